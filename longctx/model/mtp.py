"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437 §2.2): blocks after the last layer that predict further tokens.

    h⁰ = hidden states after the last norm
    hᵏ = norm_k(block_k(W_k [norm(embedding of token i + k); norm(hᵏ⁻¹)]))        k = 1 … mtp_layers
    the head's logits of hᵏ at token i predict token i + k + 1

They share the model's token table and head, and run in training only: validation, evaluation and generation skip them.

Axes: B rows, t tokens of this rank, M model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.model.block import Block
from longctx.model.chunks.branch import branch_off
from longctx.model.chunks.residual_stream import ResidualStream
from longctx.model.layers.linear import Linear
from longctx.model.layers.norms import build_norm


@dataclass(frozen=True, eq=False)
class HeadInput:
    """Input to the head, from the last layer or from an MTP block."""

    hidden_BtM: Tensor
    """Hidden states after the last norm; with a ``stream`` its handle, and the head applies the norm."""
    stream: ResidualStream | None
    norm: nn.Module | None


class MtpJoin(nn.Module):
    """Module before an MTP block: joins normed hidden states and the next token's embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        M = config.hidden_size
        self.enorm, self.hnorm = build_norm(config, M), build_norm(config, M)
        self.eh_proj = Linear(2 * M, M, bias=False)

    def forward(self, before: HeadInput, embedded_BtM: Tensor, stream: ResidualStream | None) -> tuple[Tensor, Tensor]:
        """Return the head's hidden states and the block's input, which starts its ``stream`` if it has one."""
        # Without chunks autograd sums the head's and the block's gradients.
        if before.stream is None or stream is None:
            return before.hidden_BtM, self.join(before.hidden_BtM, embedded_BtM)
        # Head and block continue from one residual stream. Under ZeRO-3 full weights exist only in this forward.
        weights = [weight for module in (self, before.norm) if module is not None for weight in module.parameters()]
        return branch_off(
            before.stream, stream, before.hidden_BtM, embedded_BtM, norm=before.norm, join=self.join, weights=weights
        )

    def join(self, hidden_BtM: Tensor, embedded_BtM: Tensor) -> Tensor:
        """Project the normed embedding and hidden states to the block's input."""
        return self.eh_proj(torch.cat((self.enorm(embedded_BtM), self.hnorm(hidden_BtM)), -1))


class MtpBlock(nn.Module):
    """A block, the join before it, and the norm between its output and the head."""

    def __init__(self, config: ModelConfig, layer: int, experts: slice = slice(None)) -> None:
        super().__init__()
        self.join, self.block = MtpJoin(config), Block(config, layer, experts)
        self.norm = build_norm(config, config.hidden_size)

"""Cross attention: queries from the batch's tokens, keys and values from a source, and its arguments in a pass.

Axes: B rows, t tokens of this rank, s source tokens, M model width, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.model.attention.core import PassCore, Plan
from longctx.model.layers.linear import Linear
from longctx.model.layers.norms import build_norm
from longctx.model.source import EncodedSource


class CrossAttention(nn.Module):
    """Projections as in softmax attention, but without positions: the source's tokens have their own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        M, D, H, K = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads
        self.head_dim = D
        self.q_proj = Linear(M, H * D, bias=config.qkv_bias)
        self.k_proj = Linear(M, K * D, bias=config.qkv_bias)
        self.v_proj = Linear(M, K * D, bias=config.qkv_bias)
        self.o_proj = Linear(H * D, M, bias=config.o_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm == "full":
            self.q_norm = build_norm(config, H * D)
            self.k_norm = build_norm(config, K * D)
        elif config.qk_norm != "none":
            self.q_norm = build_norm(config, D)
            self.k_norm = build_norm(config, D)

    def queries(self, x_BtM: Tensor) -> Tensor:
        """Project tokens to queries [B, t, H, D]."""
        return self._heads(self.q_proj(x_BtM), "q_norm")

    def keys_and_values(self, source_BsM: Tensor) -> tuple[Tensor, Tensor]:
        """Project a source to keys and values [B, s, K, D], on the ranks that hold it."""
        return self._heads(self.k_proj(source_BsM), "k_norm"), self._heads(self.v_proj(source_BsM), "")

    def output(self, heads_BtHD: Tensor) -> Tensor:
        """Mix the heads' outputs back to the model width [B, t, M]."""
        return self.o_proj(heads_BtHD.flatten(-2))

    def _heads(self, x_BtC: Tensor, norm: str) -> Tensor:
        if norm and self.qk_norm == "full":
            x_BtC = getattr(self, norm)(x_BtC)
        x_BtHD = x_BtC.unflatten(-1, (-1, self.head_dim))
        if norm and self.qk_norm == "head":
            x_BtHD = getattr(self, norm)(x_BtHD)
        return x_BtHD


@dataclass(frozen=True, eq=False)
class CrossCall:
    """Cross attention's arguments in a forward pass, for all layers."""

    core: PassCore
    plan: Plan
    scores: ScoreRules
    source: EncodedSource

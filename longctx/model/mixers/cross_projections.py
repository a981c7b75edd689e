"""Cross attention: queries from the batch's tokens, keys and values from a source, and its arguments in a pass.

Axes: B rows, t tokens of this rank, s source tokens, M model width, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longctx.config import ModelConfig
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.model.attention.core import PassCore, Plan
from longctx.model.layers.linear import Linear
from longctx.model.mixers.normed_heads import NormedHeads
from longctx.model.source import EncodedSource


class CrossAttention(NormedHeads):
    """Projections as in softmax attention, but without positions: the source's tokens have their own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        M, D, H, K = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads
        self.q_proj = Linear(M, H * D, bias=config.qkv_bias)
        self.k_proj = Linear(M, K * D, bias=config.qkv_bias)
        self.v_proj = Linear(M, K * D, bias=config.qkv_bias)
        self.o_proj = Linear(H * D, M, bias=config.o_bias)
        self.add_norms(config, H, K, D)

    def queries(self, x_BtM: Tensor) -> Tensor:
        """Project tokens to queries [B, t, H, D]."""
        return self.normed_queries(self.q_proj(x_BtM))

    def keys_and_values(self, source_BsM: Tensor) -> tuple[Tensor, Tensor]:
        """Project a source to keys and values [B, s, K, D], on the ranks that hold it."""
        return self.normed_keys(self.k_proj(source_BsM)), self.split_heads(self.v_proj(source_BsM))

    def output(self, heads_BtHD: Tensor) -> Tensor:
        """Mix the heads' outputs back to the model width [B, t, M]."""
        return self.o_proj(heads_BtHD.flatten(-2))


@dataclass(frozen=True, eq=False)
class CrossCall:
    """Cross attention's arguments in a forward pass, for all layers."""

    core: PassCore
    plan: Plan
    scores: ScoreRules
    source: EncodedSource

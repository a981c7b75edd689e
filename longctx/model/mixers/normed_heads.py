"""NormedHeads: softmax attention's heads, with the model's norms on queries and keys.

Axes: B rows, t tokens of this rank, C channels of all heads, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.model.layers.norms import build_norm


class NormedHeads(nn.Module):
    """Base class for projections to heads: a norm covers all heads' channels (OLMoE) or each head's (Qwen 3)."""

    qk_norm: str
    head_dim: int

    def add_norms(self, config: ModelConfig, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Add the norms that the model has."""
        self.qk_norm, self.head_dim = config.qk_norm, head_dim
        if config.qk_norm == "full":
            self.q_norm = build_norm(config, num_heads * head_dim)
            self.k_norm = build_norm(config, num_kv_heads * head_dim)
        elif config.qk_norm != "none":
            self.q_norm = build_norm(config, head_dim)
            self.k_norm = build_norm(config, head_dim)

    def normed_queries(self, q_BtC: Tensor) -> Tensor:
        """Return projected queries as normed heads [B, t, H, D]."""
        return self._normed(q_BtC, "q_norm")

    def normed_keys(self, k_BtC: Tensor) -> Tensor:
        """Return projected keys as normed heads [B, t, K, D]."""
        return self._normed(k_BtC, "k_norm")

    def split_heads(self, x_BtC: Tensor) -> Tensor:
        """Return channels as heads [B, t, K, D], without a norm."""
        return x_BtC.unflatten(-1, (-1, self.head_dim))

    def _normed(self, x_BtC: Tensor, norm: str) -> Tensor:
        if self.qk_norm == "none":
            return self.split_heads(x_BtC)
        if self.qk_norm == "full":
            return self.split_heads(getattr(self, norm)(x_BtC))
        return getattr(self, norm)(self.split_heads(x_BtC))

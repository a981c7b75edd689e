"""The projections around an attention core: grouped-query heads with rotary positions.

Axes: B rows, t tokens of this rank, M model width, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.model.layers import Linear
from longctx.model.positions import apply_rotary


class Attention(nn.Module):
    """Owns the four projections; the block calls the core, which it is handed, between ``project`` and ``output``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        M, D = config.hidden_size, config.head_dim
        self.head_dim = D
        self.q_proj = Linear(M, config.num_heads * D, bias=config.qkv_bias)
        self.k_proj = Linear(M, config.num_kv_heads * D, bias=config.qkv_bias)
        self.v_proj = Linear(M, config.num_kv_heads * D, bias=config.qkv_bias)
        self.o_proj = Linear(config.num_heads * D, M, bias=False)

    def project(self, x_BtM: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, t, H, D], keys and values [B, t, K, D]; queries and keys turned to their positions."""
        q, k, v = (p(x_BtM).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v

    def output(self, heads_BtHD: Tensor) -> Tensor:
        """The heads' outputs mixed back to the model width [B, t, M]."""
        return self.o_proj(heads_BtHD.flatten(-2))

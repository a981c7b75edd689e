"""How much memory the cache of a sequence takes, by arithmetic alone."""

from __future__ import annotations

import torch

from longctx.config import ModelConfig
from longctx.kernels.dtypes import accumulate_dtype
from longctx.model.attention.core import TokenChunk
from longctx.model.attention.plans import layer_shapes


def cache_bytes(config: ModelConfig, num_tokens: int, dtype: torch.dtype, *, chunk_tokens: int, degree: int = 1) -> int:
    """Bytes that the keys, values and states of so many tokens take on each of ``degree`` processes that share them.

    A layer with a window stores that and a chunk; a linear layer has one state, whole on every process.
    """
    one = torch.zeros(1, 1, dtype=torch.int64)
    chunk = TokenChunk(start=0, num_tokens=1, sequence_tokens=1, given=(range(1),))
    shapes = layer_shapes(config, one, dtype, chunk)
    row_numbers = shapes.num_kv_heads * shapes.head_dim
    if not shapes.values_in_keys:
        row_numbers += shapes.num_kv_heads * shapes.value_dim
    # Beside the sum of the values stands that of the weights.
    state_numbers = shapes.num_kv_heads * shapes.head_dim * (shapes.value_dim + 1)
    total = 0
    for layer in range(config.num_layers):
        kind, rows = config.layer_kind(layer), num_tokens
        if kind == "linear":
            total += state_numbers * accumulate_dtype(dtype).itemsize
            continue
        if kind == "window":
            rows = min(rows, config.window + chunk_tokens)
        total += -(-rows // degree) * row_numbers * dtype.itemsize
    return total

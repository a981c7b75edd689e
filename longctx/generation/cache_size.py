"""How much memory the cache of a sequence takes, by arithmetic alone."""

from __future__ import annotations

import torch

from longctx.architecture.layers import mixers_of
from longctx.config import ModelConfig
from longctx.kernels.dtypes import accumulate_dtype


def cache_bytes(config: ModelConfig, num_tokens: int, dtype: torch.dtype, *, chunk_tokens: int, degree: int = 1) -> int:
    """Bytes that the keys, values and states of so many tokens take on each of ``degree`` processes that share them.

    A layer with a window stores that and a chunk; a linear layer has one state, whole on every process.
    """
    total = 0
    for mixer, layers in mixers_of(config).items():
        cached = mixer.cached(config, num_tokens, chunk_tokens)
        rows = -(-cached.rows // degree) * cached.row_values * dtype.itemsize
        total += layers * (rows + cached.state_values * accumulate_dtype(dtype).itemsize)
    return total

"""Cache memory per sequence, by arithmetic alone."""

from __future__ import annotations

import torch

from longctx.architecture.layer_specs import mixers_of
from longctx.config import ModelConfig
from longctx.kernels.dtypes import accumulate_dtype


def cache_bytes(config: ModelConfig, num_tokens: int, dtype: torch.dtype, *, chunk_tokens: int, degree: int = 1) -> int:
    """Return the cache bytes for ``num_tokens`` tokens on each of ``degree`` processes that share them.

    Covers keys, values and states. A windowed layer stores its window and a chunk; a linear layer has one state,
    replicated on every process.
    """
    total = 0
    for mixer, layers in mixers_of(config).items():
        cached = mixer.cached(config, num_tokens, chunk_tokens)
        # Round up: the process with the most rows needs this much.
        rows = -(-cached.rows // degree) * cached.row_values * dtype.itemsize
        total += layers * (rows + cached.state_values * accumulate_dtype(dtype).itemsize)
    return total

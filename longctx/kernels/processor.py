"""This machine's processor capabilities, and its bfloat16 matmul modes."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch

MatmulMode = Literal["native", "float32"]
"""How a CPU multiplies bfloat16: directly (``native``), or converted to float32 and rounded once at the end.

Other dtypes and other devices multiply directly in either mode.
"""
MATMUL_MODES: tuple[MatmulMode, ...] = ("native", "float32")


@lru_cache(maxsize=1)
def has_native_bfloat16() -> bool:
    """Return whether the processor has bfloat16 matmul instructions; without them float32 is several times faster."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def fastest_matmul_mode() -> MatmulMode:
    """Return the faster mode on this machine's processor, a model's default."""
    if has_native_bfloat16():
        return "native"
    return "float32"


@lru_cache(maxsize=1)
def multiplies_rows_as_vectors() -> bool:
    """Return whether a matrix-vector product is faster here for one row times a matrix in bfloat16."""
    # AMX repacks the full matrix for a single row, and without bfloat16 instructions it is converted: both take up to
    # twice the time. AVX-512's bfloat16 matmul reads it in place, in half to all of a matrix-vector product's time.
    capabilities = torch.cpu.get_capabilities()
    return not capabilities.get("avx512_bf16", False) or bool(capabilities.get("amx_bf16", False))

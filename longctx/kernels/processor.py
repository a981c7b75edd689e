"""What this machine's processor can do."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=1)
def has_native_bfloat16() -> bool:
    """Whether this machine's processor multiplies bfloat16 itself; elsewhere float32 is several times faster."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))

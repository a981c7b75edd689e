"""Fresh memory for large results on a CPU."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_LEAST_BYTES = 1 << 22
"""Two huge pages: below that the kernel has hardly any to give."""


def fresh(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """``torch.empty`` in huge pages where the system gives them on request.

    A large tensor is new pages every time, and the first touch of each costs as much as writing it: asked for in 2 MiB
    instead of 4 KiB, that is next to nothing.
    """
    made = torch.empty(tuple(shape), dtype=dtype, device=device)
    advise = _madvise()
    if made.device.type == "cpu" and made.nbytes >= _LEAST_BYTES and advise is not None:
        start = -(-made.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (made.data_ptr() + made.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(start, stop - start, mmap.MADV_HUGEPAGE)  # advice: when it is not taken, pages are small
    return made


def mapped(shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
    """Zeros on a CPU in memory that is the system's again the moment it is freed; pages are had when first written.

    An allocator keeps what it is given back for later, which is of no use where a large tensor of another size comes
    next.
    """
    numel = math.prod(shape)
    nbytes = numel * dtype.itemsize
    if nbytes < _LEAST_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype)
    # private: memory that processes share, which Python asks for by itself, has no huge pages
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=dtype, count=numel).view(tuple(shape))


@lru_cache(maxsize=1)
def _madvise() -> Any:
    """The C library's function; None where there is none, or no such advice."""
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return function

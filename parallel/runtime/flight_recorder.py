"""PyTorch's flight recorder: each rank's last collectives, written to files when NCCL times out or a rank fails."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from torch._C import _distributed_c10d as distributed_c10d

PREFIX = "nccl_trace_rank_"
"""File name prefix; the rank follows."""
_COLLECTIVES = "2000"
"""Number of recorded collectives: some hundred bytes each, on the host."""


def record_collectives(folder: Path) -> None:
    """Configure NCCL to record its collectives, to files in this folder. Call it before creating the first process
    group.

    Environment variables that the user has set take precedence.
    """
    prefix = str(folder.absolute() / PREFIX)
    # Set both names: torch 2.11 reads the older one.
    settings = {
        "TORCH_FR_BUFFER_SIZE": _COLLECTIVES,
        "TORCH_NCCL_TRACE_BUFFER_SIZE": _COLLECTIVES,
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        # A collective that fails or times out ends the process without cleanup, which could block forever.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def trace_prefix() -> str:
    """Return the file name prefix; empty if recording is off."""
    return os.environ.get("TORCH_FR_DUMP_TEMP_FILE", "")


def trace_hint() -> str:
    """Return a hint about the files for the user; empty if recording is off."""
    prefix = trace_prefix()
    if not prefix:
        return ""
    path = Path(prefix)
    return (
        "NCCL itself ends a process if its collective exceeds run.timeout_seconds. Each rank's last collectives "
        f"are in {prefix}N;\nto compare them: torchfrtrace --prefix {path.name} {path.parent}"
    )


def dump_collectives(rank: int) -> None:
    """Write this rank's last collectives, unless NCCL has already done so; never raises."""
    path = Path(f"{trace_prefix()}{rank}")
    # A torch without NCCL lacks this function.
    dump = getattr(distributed_c10d, "_dump_nccl_trace", None)
    if not trace_prefix() or dump is None or path.exists():
        return
    with contextlib.suppress(Exception):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dump())

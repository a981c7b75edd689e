"""Process identity: the rank assigned by the launcher (DeepSpeed's, torchrun, a scheduler), and the code version."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path

from longctx import __version__

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("longctx", "parallel", "data_pipeline", "launcher")


def environment_rank() -> tuple[int, int]:
    """Return (rank, world size) from the launcher; (0, 1) without one."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def ranks_of_machine() -> int | None:
    """Return the number of ranks on this machine; None if unknown."""
    # torchrun always sets LOCAL_WORLD_SIZE, the deepspeed launcher LOCAL_SIZE, which a user may have exported for MPI.
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    if not ranks:
        return None
    return int(ranks)


COMMAND = "LONGCTX_COMMAND"
"""Environment variable with the verb that started this rank, as typed by the user, e.g. ``longctx train``."""


def start_line(ranks: int, arguments: Sequence[str]) -> str:
    """Return the command that starts this script on ``ranks`` local ranks, with this process's launcher."""
    words = shlex.join(arguments)
    if COMMAND in os.environ:
        return f"{os.environ[COMMAND]} --ranks {ranks} {words}".rstrip()
    launcher = f"deepspeed --num_gpus {ranks}"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = f"torchrun --standalone --nproc_per_node {ranks}"
    return f"{launcher} {shlex.quote(sys.argv[0])} {words}".rstrip()


@cache
def code_version() -> str:
    """Return version and checksum over all Python files in the four packages: ``0.1.0, sources 3f2a9c41``.

    Ranks with different code would compute different results, or deadlock.
    """
    digest = blake2b(digest_size=4)
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            content = path.read_bytes()
            # Include name and length: moving or truncating a file changes the checksum.
            digest.update(f"{path.relative_to(_ROOT).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return f"{__version__}, sources {digest.hexdigest()}"

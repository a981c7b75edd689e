"""What this process is: the rank that its launcher has given it (DeepSpeed's, torchrun, a scheduler), and its code."""

from __future__ import annotations

import os
from functools import cache
from hashlib import blake2b
from pathlib import Path

from longctx import __version__

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("longctx", "parallel", "data_pipeline", "launcher")


def environment_rank() -> tuple[int, int]:
    """(rank, world size) that the launcher gave this process; (0, 1) when there was none."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def ranks_of_machine() -> int | None:
    """Ranks on this machine; None if nobody said."""
    # torchrun always says LOCAL_WORLD_SIZE, the deepspeed launcher LOCAL_SIZE, which a user may have exported for MPI.
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    if not ranks:
        return None
    return int(ranks)


@cache
def code_version() -> str:
    """The version and a fingerprint of all Python files of the four packages: ``0.1.0, sources 3f2a9c41``.

    Ranks of two states of it would compute two things, or wait for each other.
    """
    digest = blake2b(digest_size=4)
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            content = path.read_bytes()
            # With name and length: a file that is moved or cut is another state.
            digest.update(f"{path.relative_to(_ROOT).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return f"{__version__}, sources {digest.hexdigest()}"

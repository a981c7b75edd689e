"""Which code this process runs: ranks of two states of it would compute two things, or wait for each other."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from pathlib import Path

from longctx import __version__

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("longctx", "parallel", "data_pipeline", "launcher")


@cache
def code_version() -> str:
    """The version and a fingerprint of all Python files of the four packages: ``0.1.0, sources 3f2a9c41``."""
    digest = blake2b(digest_size=4)
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            content = path.read_bytes()
            # With name and length: a file that is moved or cut is another state.
            digest.update(f"{path.relative_to(_ROOT).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return f"{__version__}, sources {digest.hexdigest()}"

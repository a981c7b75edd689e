"""Git LFS pointers: a few lines in place of a file, until ``git lfs pull`` fetches it."""

from __future__ import annotations

POINTER_LINE = b"version https://git-lfs.github.com/spec/v1"
"""The first line of every pointer, without the line end."""
FETCH_HINT = "`git lfs pull` in its repository fetches the file"
"""Hint for fetching the actual file."""


def is_pointer(head: bytes) -> bool:
    """Return whether a file with this head (at least about 64 bytes) is a pointer instead of the file itself."""
    # the full line: a later version of the specification may share the same prefix
    return head.startswith(POINTER_LINE) and head[len(POINTER_LINE) :][:1] in (b"", b"\n", b"\r")

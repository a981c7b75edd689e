"""Git LFS pointers: a few lines in place of a file, until ``git lfs pull`` fetches it."""

from __future__ import annotations

POINTER_LINE = b"version https://git-lfs.github.com/spec/v1"
"""The first line of every pointer, without its end."""
ADVICE = "`git lfs pull` in its repository fetches the file"
"""What to do about one."""


def is_pointer(head: bytes) -> bool:
    """Return whether a file with this beginning, of about 64 bytes or more, is a pointer instead of the file itself."""
    # The full line: a later version of the specification may begin with the same characters.
    return head.startswith(POINTER_LINE) and head[len(POINTER_LINE) :][:1] in (b"", b"\n", b"\r")

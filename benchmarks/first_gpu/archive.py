"""Archive of a run: all files that its steps wrote, in one file below a size limit."""

from __future__ import annotations

import tarfile
from io import BytesIO
from pathlib import Path

MOST_BYTES = 15 << 20
"""Maximum archive size: lent machines return files of at most 16 MiB."""
_LOG_BYTES = 256 << 10
_KEPT = (".json", ".log", ".txt", ".gz")


def write_archive(scratch: Path, path: Path) -> list[str]:
    """Pack the scratch folder's own files, the smallest first; return the names of those that did not fit.

    Logs keep their end. The archive appears only when complete.
    """
    files = [file for file in scratch.iterdir() if file.is_file() and file.suffix in _KEPT]
    part, left_out = path.with_suffix(".part"), []
    with tarfile.open(part, "w:gz") as archive:
        # Sizes before compression: files that fit then fit after it.
        room = MOST_BYTES
        for file in sorted(files, key=lambda file: file.stat().st_size):
            content = file.read_bytes()
            if file.suffix == ".log":
                content = content[-_LOG_BYTES:]
            if len(content) > room:
                left_out.append(file.name)
                continue
            room -= len(content)
            entry = tarfile.TarInfo(file.name)
            entry.size, entry.mtime = len(content), int(file.stat().st_mtime)
            archive.addfile(entry, BytesIO(content))
    part.replace(path)
    return left_out


def read_member(path: Path, name: str) -> bytes:
    """Return the content of one file in an archive."""
    with tarfile.open(path, "r:gz") as archive:
        member = archive.extractfile(name)
        assert member is not None, f"{name} is no file of {path}"
        return member.read()

"""The file by which two machines find out whether they see the same folder."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from longctx.errors import ConfigError

_NAME = re.compile(r"\.longctx-doctor-[0-9a-f]{32}")
_MOST_BYTES = 64


@dataclass(frozen=True)
class Probe:
    """A file with a random name and random content."""

    name: str
    content: str


@contextmanager
def probe_in(folder: Path) -> Iterator[Probe]:
    """Within the block the file is there; OSError where the folder cannot be written."""
    probe = Probe(f".longctx-doctor-{secrets.token_hex(16)}", secrets.token_hex(16))
    path = folder / probe.name
    # "x": what stands there already is nobody's probe.
    with path.open("x") as file:
        file.write(probe.content)
    try:
        yield probe
    finally:
        path.unlink(missing_ok=True)


def read_probe(folder: Path, name: str) -> str | None:
    """What this machine reads in the file; None where it sees no such file. ConfigError for any other file's name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--probe {name!r} is not a file that doctor writes. It passes this option to itself.")
    try:
        with (folder / name).open("rb") as file:
            # Not all of it: somebody may have put a large file there.
            return file.read(_MOST_BYTES).decode("ascii", errors="replace")
    except OSError:
        return None

"""A hash of the project's own code, so that two machines can tell whether they run the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import data_pipeline
import launcher
import longctx
import parallel

_ENDINGS = (".py", ".toml", ".html")


def source_hash() -> str:
    """16 hexadecimal digits of every source file of the four packages as they were imported."""
    folders = [Path(package.__path__[0]) for package in (data_pipeline, launcher, longctx, parallel)]
    return hash_folders(folders)


def hash_folders(folders: Iterable[Path]) -> str:
    """The same of any folders: names, paths below them and contents count, where the folders lie does not."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in _ENDINGS):
            # Hashes of hashes: a byte that moves from one file to the next changes the sum.
            name = f"{folder.name}/{path.relative_to(folder).as_posix()}"
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{name}\0{content}\0".encode())
    return digest.hexdigest()[:16]

"""Completion records: small JSON files, written last, that validate the files next to them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipeline.shards.manifest import hash_json
from longctx.files import hash_file, sync_path, write_atomically


def save_record(path: Path, format: str, values: dict[str, Any]) -> None:
    """Write a record atomically, with its own hash, and sync it to disk."""
    body = {"format": format, **values}
    write_atomically(path, json.dumps(body | {"hash": hash_json(body)}).encode())


def load_record(path: Path, format: str) -> dict[str, Any] | None:
    """Return a record's values; None if it is missing, damaged or from another release."""
    # Never an error: the files that it would validate are rebuilt.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        body = json.loads(path.read_bytes())
        recorded = body.pop("hash")
        if hash_json(body) == recorded and body.pop("format") == format:
            return body
    return None


def sync_files(folder: Path) -> dict[str, str]:
    """Sync every file in a folder to disk and return xxh3_128 checksums by name."""
    paths = sorted(folder.iterdir())
    for path in paths:
        sync_path(path)
    return {path.name: hash_file(path) for path in paths}


def are_whole(folder: Path, files: Mapping[str, str]) -> bool:
    """Return whether a folder's files have these xxh3_128 checksums; False if one is missing."""
    return all((folder / name).is_file() and hash_file(folder / name) == hash for name, hash in files.items())

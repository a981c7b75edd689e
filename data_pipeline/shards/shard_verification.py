"""Selects the shards whose checksums must still be verified, and assigns them to readers.

This module does not depend on processes: the launcher compares the ranks' views, assigns the files and combines the
results.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from data_pipeline.shards.block_checksum import RECOVERY_HINT, read_checksum_file
from data_pipeline.shards.file_states import FileState, file_state, place_of, read_file_states, write_file_states
from data_pipeline.shards.manifest import MANIFEST_FILE, Manifest, ShardEntry, hash_json
from data_pipeline.shards.reader import ShardSet
from data_pipeline.stores.urls import ObjectPath
from longctx.errors import DataError
from longctx.files import hash_file

log = logging.getLogger(__name__)

Verify = Literal["read", "start", "off"]
"""When shards are verified: ``read``, by block checksums as they are read; ``start``, completely before the first step,
once per file state, and again as they are read; ``off``, never.
"""

_MIN_AGE_NANOSECONDS = 2_000_000_000
"""Minimum age of a change before its state is recorded: two changes within one clock tick have the same time."""


class FolderCheck:
    """Remaining checks for one shard folder, as seen by this process."""

    def __init__(self, folder: Path, manifest: Manifest, verify: Verify) -> None:
        """Read every file's state and the known verification records; raise DataError if a file is missing."""
        self.folder = folder
        self.manifest_hash, self.shards = manifest.hash, manifest.shards
        # Take states before any file is hashed: a change while hashing then invalidates the record.
        self._states = [_state(folder / entry.file) for entry in self.shards]
        self._known_states: dict[str, tuple[FileState, str]] = {}
        self.pending: list[ShardEntry] = []
        """Files that must be read, in the manifest's order."""
        self.missing_checksum = verify == "read" and not manifest.has_block_checksum
        """True if files are read only because reads could not be verified."""
        if verify == "start" or self.missing_checksum:
            self._known_states = read_file_states(folder, self.manifest_hash)
            self.pending = [
                entry for entry, state in zip(self.shards, self._states, strict=True) if self._is_new(entry, state)
            ]

    @property
    def view(self) -> str:
        """Fingerprint, equal on processes that see the same files and have the same ones left to read."""
        # Ranks with different views see different files or caches, and cannot reuse one rank's verification.
        states = [list(state) for state in self._states]
        return hash_json([place_of(self.folder), self.manifest_hash, states, [entry.file for entry in self.pending]])

    def problem(self, entry: ShardEntry) -> str | None:
        """Read one file completely, with its block checksums; return its problem, if any."""
        path = self.folder / entry.file
        try:
            if hash_file(path) == entry.xxh3_128:
                if entry.sums:
                    read_checksum_file(self.folder, entry)
                return None
        except DataError as error:
            return str(error)
        except OSError as error:
            return f"{path} cannot be read ({error.strerror or error}). {RECOVERY_HINT}"
        return f"{path} is damaged: its checksum does not match {MANIFEST_FILE}. {RECOVERY_HINT}"

    def save_file_states(self) -> None:
        """Save each file's state before it was read. Call this once all checksums have been verified.

        Raises DataError if the cache cannot be written.
        """
        if not self.pending:
            return
        cutoff = time.time_ns() - _MIN_AGE_NANOSECONDS
        files = list(zip(self.shards, self._states, strict=True))
        write_file_states(
            self.folder, self.manifest_hash, [(entry, state) for entry, state in files if state[2] < cutoff]
        )

    def _is_new(self, entry: ShardEntry, state: FileState) -> bool:
        return self._known_states.get(entry.file) != (state, entry.xxh3_128)


def open_validated(folder: str | Path | ObjectPath, *, whole: bool = False) -> ShardSet:
    """Open a folder so that no damaged data is ever read, in the cheapest way. For a single process.

    Reads are verified by block checksums. Files without them, or all files if ``whole``, are read here, except those
    with a valid verification record. DataError names the first file that is missing or damaged.
    """
    shards = ShardSet.open(folder)
    if shards.verifies_reads and not whole:
        return shards
    if shards.copy is not None:
        for entry in shards.manifest.shards:
            shards.copy.fetch(entry)
    check = FolderCheck(shards.folder, shards.manifest, "start")
    for entry in check.pending:
        problem = check.problem(entry)
        if problem is not None:
            raise DataError(problem)
    try:
        check.save_file_states()
    except (DataError, OSError) as error:
        log.warning("%s\nThe next start will read the data's checksums again.", error)
    return shards


def assign_shards(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Assign item numbers to ``parts`` readers: each item once, largest first to the least loaded reader."""
    # Longest processing time first (Graham, 1969); ``loads`` is a heap.
    loads = [(0, part) for part in range(parts)]
    shares: list[list[int]] = [[] for _ in range(parts)]
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        load, part = loads[0]
        shares[part].append(number)
        heapq.heapreplace(loads, (load + sizes[number], part))
    return [sorted(share) for share in shares]


def _state(path: Path) -> FileState:
    try:
        return file_state(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or error}), though {MANIFEST_FILE} lists it. {RECOVERY_HINT}"
        ) from error

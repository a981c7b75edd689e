"""Selection of the shards of a folder whose checksums must still be verified, and their assignment to readers.

This module knows nothing of processes: the launcher compares the views of ranks, assigns the files and combines the
results.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from data_pipeline.shards.manifest import MANIFEST_FILE, Manifest, ShardEntry, hash_json
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.stamps import FileState, file_state, place_of, read_stamps, write_stamps
from data_pipeline.shards.sums import ADVICE, read_sums
from data_pipeline.stores.urls import ObjectPath
from longctx.errors import DataError
from longctx.files import hash_file

log = logging.getLogger(__name__)

Verify = Literal["read", "start", "off"]
"""When shards are checked against their checksums: block by block as they are read; all of them before the first step,
once for each state of a file, and again as they are read; or never."""

_SETTLED_NANOSECONDS = 2_000_000_000
"""How old a change must be before a stamp is taken: two changes within a tick of the clock have one time."""


class FolderCheck:
    """Remaining checks of one shard folder, as seen by this process."""

    def __init__(self, folder: Path, manifest: Manifest, verify: Verify) -> None:
        """Read the state of every file and the known stamps; raise DataError if a file is missing."""
        self.folder = folder
        self.manifest_hash, self.shards = manifest.hash, manifest.shards
        self._states = [_state(folder / entry.file) for entry in self.shards]
        self._stamps: dict[str, tuple[FileState, str]] = {}
        self.pending: list[ShardEntry] = []
        """Files that have to be read, in the manifest's order."""
        self.lacks_sums = verify == "read" and not manifest.has_sums
        """Whether files are read only because reads could not be checked."""
        if verify == "start" or self.lacks_sums:
            self._stamps = read_stamps(folder, self.manifest_hash)
            self.pending = [
                entry for entry, state in zip(self.shards, self._states, strict=True) if self._is_new(entry, state)
            ]

    @property
    def view(self) -> str:
        """A fingerprint, equal on processes that see the same files and have the same ones left to read."""
        states = [list(state) for state in self._states]
        return hash_json([place_of(self.folder), self.manifest_hash, states, [entry.file for entry in self.pending]])

    def problem(self, entry: ShardEntry) -> str | None:
        """Read one file completely, and its sums; return its problem, or None if its checksum is right."""
        path = self.folder / entry.file
        try:
            if hash_file(path) == entry.xxh3_128:
                if entry.sums:
                    read_sums(self.folder, entry)
                return None
        except DataError as error:
            return str(error)
        except OSError as error:
            return f"{path} cannot be read ({error.strerror or error}). {ADVICE}"
        return f"{path} is damaged: its checksum is not the one in {MANIFEST_FILE}. {ADVICE}"

    def keep_stamps(self) -> None:
        """Save the state that every file had before it was read. Call this once all checksums have been verified.

        Raises DataError if the cache cannot be written.
        """
        if not self.pending:
            return
        settled = time.time_ns() - _SETTLED_NANOSECONDS
        files = list(zip(self.shards, self._states, strict=True))
        write_stamps(self.folder, self.manifest_hash, [(entry, state) for entry, state in files if state[2] < settled])

    def _is_new(self, entry: ShardEntry, state: FileState) -> bool:
        return self._stamps.get(entry.file) != (state, entry.xxh3_128)


def open_verified(folder: str | Path | ObjectPath, *, whole: bool = False) -> ShardSet:
    """Open a folder so that no damaged data is ever read, in the cheapest way. For a single process.

    Reads are checked by the sums of blocks. Files without sums, and all of them if ``whole``, are read here, except
    those with a valid stamp. DataError names the first file that is missing or damaged.
    """
    shards = ShardSet.open(folder)
    if shards.verifies_reads and not whole:
        return shards
    if shards.copy is not None:
        for entry in shards.manifest.shards:
            shards.copy.bring(entry)
    check = FolderCheck(shards.folder, shards.manifest, "start")
    for entry in check.pending:
        problem = check.problem(entry)
        if problem is not None:
            raise DataError(problem)
    try:
        check.keep_stamps()
    except (DataError, OSError) as error:
        log.warning("%s\nThe next start will read the data's checksums again.", error)
    return shards


def deal(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Return the item numbers for each of ``parts`` readers: each item once, largest first to the least loaded."""
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
            f"{path} cannot be read ({error.strerror or error}), though {MANIFEST_FILE} lists it. {ADVICE}"
        ) from error

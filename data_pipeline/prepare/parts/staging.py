"""Staging folder next to the output, in which a build grows and from which a killed build continues.

``.NAME.partial`` contains a lock, the recipe, ``parts/NNNNN`` and, just before the output appears, ``whole``. A search
for duplicates adds ``signatures/NNNNN`` from the first pass and then ``decisions``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.prepare.duplicates.outcome import DUPLICATES_FILE, Outcome
from data_pipeline.prepare.duplicates.signed import RECORD_FILE as SIGNED_FILE
from data_pipeline.prepare.left_out import LEFT_OUT_FILE, LeftOutFile
from data_pipeline.prepare.parts.part_record import RECORD_FILE, SPLITS, PartRecord, find_invalid_file
from data_pipeline.prepare.source_items import Skip
from data_pipeline.shards.block_checksum import checksum_file
from data_pipeline.shards.manifest import Manifest, ShardEntry, sorted_histogram
from longctx.errors import DataError
from longctx.files import convert_write_errors, sync_path, write_atomically
from longctx.tokenizer.tokenizer_base import Tokenizer

FORMAT = "longctx-build-1"
_LOCK, _RECIPE, _PARTS, _WHOLE = "lock", "recipe.json", "parts", "whole"
_SIGNATURES, _DECISIONS = "signatures", "decisions"
_LAST_BREATH_SECONDS = 30.0
"""Time for which workers of a killed build may still hold its lock: they end once their connection closes."""

KEPT = "Finished parts are kept: run the same command again to resume."
"""Message for a build that ends early."""

Recipe = dict[str, Any]
"""Inputs that determine the output: source parts from another recipe cannot be reused."""


def move_shard(path: Path, to: Path) -> None:
    """Rename a shard and its checksum file, each if it exists: an assembly may have ended between the two."""
    for old, new in ((path.with_name(checksum_file(path.name)), to.with_name(checksum_file(to.name))), (path, to)):
        if old.exists():
            old.rename(new)


def staging_folder(output: Path) -> Path:
    """Return the staging folder for ``output``."""
    return output.with_name(f".{output.name}.partial")


class Staging:
    """An open, locked staging folder; see ``open_staging``."""

    def __init__(self, output: Path, lock: int) -> None:
        self.output = output
        self.folder = staging_folder(output)
        self.whole = self.folder / _WHOLE
        """Folder in which the output is assembled."""
        self.signatures = self.folder / _SIGNATURES
        self.decisions = self.folder / _DECISIONS
        """Folder with the decision on duplicates, if they were searched."""
        self.lock = lock
        """Lock file handle: a process that inherits it keeps the folder closed to other builds."""

    def part_folder(self, number: int) -> Path:
        """Return the folder for a source part's shards."""
        return self.folder / _PARTS / f"{number:05d}"

    def signatures_folder(self, number: int) -> Path:
        """Return the folder for a source part's text hashes."""
        return self.signatures / f"{number:05d}"

    def finished(self, count: int) -> tuple[dict[int, PartRecord], list[str]]:
        """Return the records of intact source parts, by number, and the damaged files in others."""
        records: dict[int, PartRecord] = {}
        invalid_files: list[str] = []
        for number in range(count):
            record = PartRecord.load(self.part_folder(number))
            if record is None:
                continue
            problem = find_invalid_file(self.part_folder(number), record)
            if problem is None:
                records[number] = record
            else:
                invalid_files.append(problem)
        return records, invalid_files

    def moves(self, records: list[PartRecord]) -> Iterator[tuple[str, ShardEntry, Path]]:
        """Yield each shard's split, its entry in the assembled folder, and its path in its source part."""
        for split in SPLITS:
            number = 0
            for part, record in enumerate(records):
                for entry in record.splits[split].shards:
                    # Numbered across source parts, so that names do not reveal the division into parts.
                    moved = dataclasses.replace(entry, file=f"{number:05d}.arrow")
                    yield split, moved, self.part_folder(part) / split / entry.file
                    number += 1

    def split_folder(self, split: str) -> Path:
        """Return a split's folder within the assembled folder."""
        if split == "training":
            return self.whole
        return self.whole / split

    def take_back(self, count: int) -> None:
        """Undo a killed assembly: move shards back to their source parts."""
        if not self.whole.exists():
            return
        loaded = [PartRecord.load(self.part_folder(number)) for number in range(count)]
        records = [record for record in loaded if record is not None]
        # An assembly starts when all source parts are complete; if one is missing, its contents cannot be trusted.
        if len(records) == count:
            for split, entry, home in self.moves(records):
                move_shard(self.split_folder(split) / entry.file, home)
        shutil.rmtree(self.whole)

    def publish(self) -> None:
        """Rename the assembled folder to the output and remove everything else. An older output is removed last."""
        retired = self.output.with_name(f".{self.output.name}.retired")
        # Sync files before the rename: after a crash, an output folder that exists must be complete.
        for path in self.whole.rglob("*"):
            sync_path(path)
        sync_path(self.whole)
        # Two renames, and between them no output: a build that is killed there continues from the source parts.
        if self.output.exists() and any(self.output.iterdir()):
            shutil.rmtree(retired, ignore_errors=True)
            self.output.rename(retired)
        self.whole.rename(self.output)
        sync_path(self.output.parent)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(retired, ignore_errors=True)


@contextlib.contextmanager
def open_staging(
    output: Path, recipe: Recipe, *, count: int, overwrite: bool, say: Callable[[str], None]
) -> Iterator[Staging]:
    """Yield the locked staging folder for ``output``, with the remains of an earlier build of the same recipe.

    Raises DataError if another build writes there, or if a build with another recipe left finished source parts there,
    unless ``overwrite``. After an error the folder is kept if a part is finished, and removed otherwise.
    """
    folder = staging_folder(output)
    with convert_write_errors(output, kept=KEPT):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder, output)
        try:
            _resolve_recipe(folder, output, recipe, overwrite=overwrite, say=say)
            staging = Staging(output, lock)
            staging.take_back(count)
            try:
                yield staging
            except BaseException as error:
                if not _has_finished_parts(folder):
                    shutil.rmtree(folder, ignore_errors=True)
                elif KEPT not in str(error):
                    say(KEPT)
                raise
        finally:
            os.close(lock)


def remove_stale_staging(output: Path) -> None:
    """Remove the staging folder of a build that was killed after its output had appeared."""
    folder = staging_folder(output)
    # Only if it is emptied: another build may be running there at this moment.
    if not (folder / _RECIPE).is_file() or (folder / _WHOLE).exists() or any(folder.rglob("*.arrow")):
        return
    if (folder / _SIGNATURES).exists():
        return
    with contextlib.suppress(DataError, OSError):
        lock = _lock(folder, output, timeout_seconds=0)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _resolve_recipe(folder: Path, output: Path, recipe: Recipe, *, overwrite: bool, say: Callable[[str], None]) -> None:
    """Initialize the folder for ``recipe``; raise DataError if it belongs to another recipe."""
    content = {"format": FORMAT, **recipe}
    path = folder / _RECIPE
    found = None
    # The file is missing after a kill in the first milliseconds.
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_bytes())
    if found == content:
        return
    if found is None:
        other_files = sorted({entry.name for entry in folder.iterdir()} - {_LOCK, _RECIPE})
        if any(not name.startswith(f".{_RECIPE}.") for name in other_files):
            raise DataError(f"{folder} is reserved for the build but contains {other_files[0]}. Remove it.")
    elif _has_finished_parts(folder) and not overwrite:
        mismatches = [key for key in content if not isinstance(found, dict) or found.get(key) != content[key]]
        raise DataError(
            f"{folder} contains finished parts from a build of {output} with another {' and '.join(mismatches)}.\n"
            "Resume that build, start over with --overwrite (overwrite=True), or remove the folder."
        )
    else:
        if _has_finished_parts(folder):
            say(f"removing another build's parts from {folder}")
        for name in (_PARTS, _WHOLE, _SIGNATURES, _DECISIONS):
            shutil.rmtree(folder / name, ignore_errors=True)
    write_atomically(path, json.dumps(content).encode())


def _has_finished_parts(folder: Path) -> bool:
    """Return whether a build has left finished work that another one can reuse."""
    records = (f"{_PARTS}/*/{RECORD_FILE}", f"{_SIGNATURES}/*/{SIGNED_FILE}", f"{_DECISIONS}/*")
    return any(any(folder.glob(pattern)) for pattern in records)


def _lock(folder: Path, output: Path, timeout_seconds: float = _LAST_BREATH_SECONDS) -> int:
    """Return a handle to the folder's lock; raise DataError if another build holds it.

    The lock is released when all processes that hold it have ended.
    """
    until = time.monotonic() + timeout_seconds
    while True:
        folder.mkdir(exist_ok=True)
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have removed the file since it was opened: then the handle locks no file at this
            # path.
            if _is_open_at(handle, folder / _LOCK):
                os.ftruncate(handle, 0)
                os.write(handle, f"{socket.gethostname()} {os.getpid()}".encode())
                return handle
        except BlockingIOError as error:
            host, _, pid = os.pread(handle, 1000, 0).decode(errors="replace").partition(" ")
            if not _has_died(host, pid) or time.monotonic() > until:
                os.close(handle)
                raise DataError(
                    f"output={output} is being built by process {pid} on {host}.\n"
                    "Wait for it, stop it, or name another folder."
                ) from error
        os.close(handle)
        time.sleep(0.05)


def _is_open_at(handle: int, path: Path) -> bool:
    """Return whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _has_died(host: str, pid: str) -> bool:
    """Return whether the process named in the lock is gone, so that only its workers can hold it."""
    if host != socket.gethostname() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def assemble_folder(
    staging: Staging,
    records: list[PartRecord],
    *,
    listing_skipped: Sequence[Skip],
    skipped: dict[str, int],
    tokenizer: Tokenizer,
    sources: list[dict[str, Any]],
    options: dict[str, Any],
    outcome: Outcome | None = None,
    kind: str = "",
) -> None:
    """Assemble all source parts, in order, into a shard folder in ``staging.whole``. Shards are moved, not copied.

    ``outcome`` is the decision on duplicates, if they were searched; ``kind`` is the manifest's.
    """
    staging.whole.mkdir()
    left_out = LeftOutFile(staging.whole)
    for skip in listing_skipped:
        left_out.add(skip)
    for number, record in enumerate(records):
        if record.left_out:
            left_out.append(staging.part_folder(number) / LEFT_OUT_FILE)
    left_out_hash = left_out.close()
    found = _copy_duplicates(staging, outcome)
    entries: dict[str, list[ShardEntry]] = {split: [] for split in SPLITS}
    for split, entry, home in staging.moves(records):
        folder = staging.split_folder(split)
        folder.mkdir(exist_ok=True)
        # A rename within one file system, so moving terabytes costs no time.
        move_shard(home, folder / entry.file)
        entries[split].append(entry)
    for split in SPLITS:
        # An empty split gets no folder.
        if not entries[split]:
            continue
        tokenizer.save(staging.split_folder(split))
        # The list belongs to the source: it is stored once, with the training split.
        list_hash = ""
        duplicates: dict[str, Any] = {}
        if split == "training":
            list_hash = left_out_hash
            duplicates = found
        manifest = Manifest(
            split=split,
            vocab_size=tokenizer.vocab_size,
            padding=tokenizer.padding,
            tokenizer=tokenizer.fingerprint,
            sources=sources,
            options=options,
            shards=entries[split],
            skipped=skipped,
            left_out=list_hash,
            duplicates=duplicates,
            kind=kind,
            **_sums(records, split),
        )
        manifest.save(staging.split_folder(split))


def _copy_duplicates(staging: Staging, outcome: Outcome | None) -> dict[str, Any]:
    """Copy the list of removed duplicates into the assembled folder; return the manifest's entry about them."""
    if outcome is None:
        return {}
    found: dict[str, Any] = dataclasses.asdict(outcome.counts)
    if DUPLICATES_FILE in outcome.files:
        # Copied and not moved: a killed assembly is undone by removing the assembled folder.
        shutil.copyfile(staging.decisions / DUPLICATES_FILE, staging.whole / DUPLICATES_FILE)
        found["list"] = outcome.files[DUPLICATES_FILE]
    return found


def _sums(records: list[PartRecord], split: str) -> dict[str, Any]:
    """Return the manifest's counts for a split, over all source parts."""
    # Only totals: for a large corpus, lists of documents would fill the memory.
    parts = [record.splits[split] for record in records]
    lengths: Counter[str] = Counter()
    for part in parts:
        lengths.update(part.length_histogram)
    return {
        "documents": sum(part.documents for part in parts),
        "tokens": sum(part.tokens for part in parts),
        "text_bytes": sum(part.text_bytes for part in parts),
        "length_histogram": sorted_histogram(lengths),
        "inexact_documents": sum(part.inexact for part in parts),
    }

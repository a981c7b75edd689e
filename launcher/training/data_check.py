"""Check a run's shards before its first step: fetched to every host, verified by checksum, equal on every rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from data_pipeline.shards.file_states import place_of
from data_pipeline.shards.local_copies import LocalCopy
from data_pipeline.shards.manifest import ShardEntry
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.shard_verification import FolderCheck, Verify, assign_shards
from launcher.wording import ONLY_IN_FILE
from longctx.errors import DataError
from parallel.comm.world import gather_objects, on_every_rank, own_rank

log = logging.getLogger(__name__)

Source = TypeVar("Source", LocalCopy, FolderCheck)
_SHOWN = 8
"""Limit on damaged files named in a message."""


@dataclass(frozen=True, kw_only=True)
class _View:
    """A rank's view of the data; small, because every rank gathers all of them."""

    data: tuple[str, ...]
    """Manifest hash for each folder."""
    copy: str
    """Equal on ranks that see the same files and have the same ones left to read."""
    has_pending: bool


def check_data(folders: Sequence[ShardSet], verify: Verify) -> list[ShardEntry]:
    """Read the files that ``data.verify`` requests, divided among ranks that see the same files. Collective.

    Return the shards that this rank has read. Raise DataError on every rank if a file is damaged on any rank, or if
    ranks see different data under one path.
    """
    checks = on_every_rank(lambda: [FolderCheck(shards.folder, shards.manifest, verify) for shards in folders])
    pending = [(check, entry) for check in checks for entry in check.pending]
    view = _View(
        data=tuple(check.manifest_hash for check in checks),
        copy=" ".join(check.view for check in checks),
        has_pending=bool(pending),
    )
    views = gather_objects(view)
    _check_same(folders, views)
    # Hosts with separate copies read their own; hosts that share a file system divide the reading.
    own = _own_share(pending, [view.copy for view in views])
    if any(view.has_pending for view in views):
        problems = [check.problem(entry) for check, entry in own]
        # Portions take unequal times: the control group waits for the longest.
        _raise_errors([problem for problem in problems if problem is not None])
        _store_validated(checks)
    shards, read = [entry for check in checks for entry in check.shards], [entry for _, entry in own]
    log.info(
        "data.verify=%s: %d shards (%.1f GB); checksums verified here: %d (%.1f GB).",
        verify,
        len(shards),
        sum(entry.bytes for entry in shards) / 1e9,
        len(read),
        sum(entry.bytes for entry in read) / 1e9,
        extra={ONLY_IN_FILE: True},
    )
    without_sums = [str(check.folder) for check in checks if check.missing_checksum]
    if without_sums:
        log.info(
            "Built by a release without checksum blocks: %s. These files cannot be verified while the run reads "
            "them, so they are read before the first step, as with data.verify=start. Build the data again to change "
            "that.",
            " and ".join(without_sums),
        )
    return read


def _own_share(shards: Sequence[tuple[Source, ShardEntry]], views: Sequence[str]) -> list[tuple[Source, ShardEntry]]:
    """Return this rank's portion of the shards, divided among ranks with the same entry in ``views``."""
    rank = own_rank()
    readers = [other for other, view in enumerate(views) if view == views[rank]]
    shares = assign_shards([entry.bytes for _, entry in shards], len(readers))
    return [shards[number] for number in shares[readers.index(rank)]]


def _check_same(folders: Sequence[ShardSet], views: Sequence[_View]) -> None:
    """Raise DataError, with the same message on all ranks, unless every rank has rank 0's manifests."""
    for rank, view in enumerate(views):
        if view.data == views[0].data:
            continue
        if len(view.data) != len(views[0].data):
            raise DataError(
                f"data folders differ between ranks: rank 0 has {len(views[0].data)} (training, and validation if "
                f"set), rank {rank} has {len(view.data)}.\nCopy the same folders to every host."
            )
        names = [str(shards.folder) for shards in folders]
        mismatches = [n for n, (mine, first) in enumerate(zip(view.data, views[0].data, strict=True)) if mine != first]
        number = mismatches[0]
        raise DataError(
            f"{names[number]} differs between ranks: its manifest's hash is {views[0].data[number]} on rank 0 and "
            f"{view.data[number]} on rank {rank}.\nCopy one host's folder to the others."
        )


def _raise_errors(own: list[str]) -> None:
    # Gathered, so that every rank raises the same error. Only each rank's first few: the message must stay small even
    # if much of a disk is damaged.
    found = gather_objects((len(own), own[:_SHOWN]))
    total = sum(count for count, _ in found)
    if not total:
        return
    lines = list(dict.fromkeys(line for _, shown in found for line in shown))[:_SHOWN]
    if total > len(lines):
        lines.append(f"{total - len(lines)} more files are damaged.")
    raise DataError("\n".join(lines))


def _store_validated(checks: Sequence[FolderCheck]) -> None:
    """Store which files are verified. If that fails the run continues, and the next start reads them again."""
    try:
        for check in checks:
            check.save_file_states()
    except (DataError, OSError) as error:
        log.warning(
            "%s\nThe next start will read the data's checksums again (LONGCTX_CACHE names another folder).", error
        )


def fetch_data(folders: Sequence[ShardSet]) -> None:
    """Fetch missing files for copies, divided among the ranks that share a cache. Collective.

    Raise DataError on every rank if an object is missing or damaged, or, before fetching, if a host lacks room for all.
    Files fetched before an error are kept.
    """
    copies = [shards.copy for shards in folders if shards.copy is not None]
    missing = [(copy, entry) for copy in copies for entry in copy.missing()]
    # On every rank, even without copies: other hosts may have some.
    caches = gather_objects(" ".join(f"{place_of(copy.folder)} {copy.folder.resolve()}" for copy in copies))
    if not any(caches):
        return
    on_every_rank(lambda: _check_free_space(copies))
    # Ranks that share a cache miss the same shards: all have listed them before the first one fetches.
    _raise_errors(_fetch(_own_share(missing, caches)))
    # Another run may fetch into the same cache, and fail: fetch shards that are still missing.
    _raise_errors(_fetch([(copy, entry) for copy in copies for entry in copy.missing()]))


def _check_free_space(copies: Sequence[LocalCopy]) -> None:
    for copy in copies:
        copy.check_free_space()


def _fetch(shards: Sequence[tuple[LocalCopy, ShardEntry]]) -> list[str]:
    """Fetch shards one by one; return the first error."""
    for number, (copy, entry) in enumerate(shards, start=1):
        try:
            copy.fetch(entry)
        except DataError as error:
            return [str(error)]
        log.info("fetched %s from %s (%d of %d here)", entry.file, copy.origin, number, len(shards))
    return []

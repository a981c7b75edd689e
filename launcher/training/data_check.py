"""``check_data``: the checksums of a run's shards, each file read by one rank, and the same data on every rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.verify import FolderCheck, Verify, deal
from longctx.errors import DataError
from parallel.comm.world import gather_objects, on_every_rank, own_rank

log = logging.getLogger(__name__)

_SHOWN = 8
"""Damaged files that a message names."""


@dataclass(frozen=True, kw_only=True)
class CheckedData:
    """What a start had to read of its data."""

    files: int
    bytes: int
    """Of all shards."""
    read_files: int
    read_bytes: int
    """Of those that this rank read against their checksums."""
    without_sums: list[str]
    """Folders that were read only because reads of them cannot be checked."""


@dataclass(frozen=True, kw_only=True)
class _View:
    """What a rank sees; small, because every rank gets those of all."""

    data: tuple[str, ...]
    """The hash of each folder's manifest."""
    copy: str
    """Equal on ranks that see the same files and have the same ones left to read."""
    has_pending: bool


def check_data(folders: Sequence[ShardSet], verify: Verify) -> CheckedData:
    """Read what ``data.verify`` asks for, dealt out over the ranks that see the same files. Collective.

    DataError on every rank when a file is damaged on any, and when ranks see different data under one path.
    """
    checks = on_every_rank(lambda: [FolderCheck(shards.folder, shards.manifest, verify) for shards in folders])
    views: list[_View] = gather_objects(_view(checks))
    rank = own_rank()
    _check_same(folders, views)
    pending = [(check, entry) for check in checks for entry in check.pending]
    # Hosts with copies of their own read each theirs; those that see one file system share the reading.
    readers = [other for other, view in enumerate(views) if view.copy == views[rank].copy]
    shares = deal([entry.bytes for _, entry in pending], len(readers))
    own = [pending[number] for number in shares[readers.index(rank)]]
    if any(view.has_pending for view in views):
        problems = [check.problem(entry) for check, entry in own]
        # Shares take unequal times: the control group waits for the longest.
        raise_damage([problem for problem in problems if problem is not None])
        _keep_stamps(checks)
    return CheckedData(
        files=sum(len(check.shards) for check in checks),
        bytes=sum(entry.bytes for check in checks for entry in check.shards),
        read_files=len(own),
        read_bytes=sum(entry.bytes for _, entry in own),
        without_sums=[str(check.folder) for check in checks if check.lacks_sums],
    )


def _view(checks: Sequence[FolderCheck]) -> _View:
    return _View(
        data=tuple(check.manifest_hash for check in checks),
        copy=" ".join(check.view for check in checks),
        has_pending=any(check.pending for check in checks),
    )


def _check_same(folders: Sequence[ShardSet], views: Sequence[_View]) -> None:
    """DataError unless every rank has the manifests of rank 0, in the same words on all."""
    for rank, view in enumerate(views):
        if view.data == views[0].data:
            continue
        if len(view.data) != len(views[0].data):
            raise DataError(
                f"ranks do not see the same folders of data: rank 0 has {len(views[0].data)} (training, and validation "
                f"where there is one), rank {rank} has {len(view.data)}.\nCopy the same folders to every host."
            )
        names = [str(shards.folder) for shards in folders]
        differing = [n for n, (mine, first) in enumerate(zip(view.data, views[0].data, strict=True)) if mine != first]
        number = differing[0]
        raise DataError(
            f"{names[number]} is not the same data on every rank: its manifest's hash is {views[0].data[number]} on "
            f"rank 0 and {view.data[number]} on rank {rank}.\nCopy the folder of one host to the others."
        )


def raise_damage(own: list[str]) -> None:
    """DataError on every rank, with the damaged files of all of them."""
    # The first few of each rank: what travels must stay small, however much of a disk is broken.
    found = gather_objects((len(own), own[:_SHOWN]))
    total = sum(count for count, _ in found)
    if not total:
        return
    lines = list(dict.fromkeys(line for _, shown in found for line in shown))[:_SHOWN]
    if total > len(lines):
        lines.append(f"{total - len(lines)} more files are damaged.")
    raise DataError("\n".join(lines))


def _keep_stamps(checks: Sequence[FolderCheck]) -> None:
    """Remember what was right. Without a place for that the run goes on, and the next start reads again."""
    try:
        for check in checks:
            check.keep_stamps()
    except (DataError, OSError) as error:
        log.warning(
            "%s\nThe next start will read the data's checksums again (LONGCTX_CACHE names another folder).", error
        )

"""``fetch_data``: shards of a run that are packed or in a store, brought to every host before the first step."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from data_pipeline.shards.copies import LocalCopy
from data_pipeline.shards.manifest import ShardEntry
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.stamps import place_of
from data_pipeline.shards.verify import deal
from launcher.training.data_check import raise_damage
from longctx.errors import DataError
from parallel.comm.world import gather_objects, on_every_rank, own_rank

log = logging.getLogger(__name__)


def fetch_data(folders: Sequence[ShardSet]) -> None:
    """Bring what is missing of copies, dealt out over the ranks that share a cache. Collective.

    DataError on every rank when an object is missing or damaged, and before anything is fetched where a host has no
    room for all. What came before an error is kept.
    """
    copies = [shards.copy for shards in folders if shards.copy is not None]
    missing = [(copy, entry) for copy in copies for entry in copy.missing()]
    # On every rank, also where nothing is a copy: hosts may have folders of their own.
    caches = gather_objects(" ".join(f"{place_of(copy.folder)} {copy.folder.resolve()}" for copy in copies))
    if not any(caches):
        return
    rank = own_rank()
    # Ranks that share a cache miss the same shards: all have looked before the first one fetches.
    readers = [other for other, cache in enumerate(caches) if cache == caches[rank]]
    on_every_rank(lambda: _check_room(copies))
    shares = deal([entry.bytes for _, entry in missing], len(readers))
    own = [missing[number] for number in shares[readers.index(rank)]]
    raise_damage(_fetch(own))
    # Another run may fetch into the same cache, and fail: what is still missing is taken here.
    raise_damage(_fetch([(copy, entry) for copy in copies for entry in copy.missing()]))


def _check_room(copies: Sequence[LocalCopy]) -> None:
    for copy in copies:
        copy.check_room()


def _fetch(shards: Sequence[tuple[LocalCopy, ShardEntry]]) -> list[str]:
    """Fetch shards, one after the other; what is wrong with the first that cannot be."""
    for number, (copy, entry) in enumerate(shards, start=1):
        try:
            copy.bring(entry)
        except DataError as error:
            return [str(error)]
        log.info("fetched %s of %s (%d of %d here)", entry.file, copy.origin, number, len(shards))
    return []

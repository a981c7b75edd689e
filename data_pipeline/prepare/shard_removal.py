"""Removes shards from a built folder by rewriting its manifest from the remaining shards' offsets.

In a store, the remaining shards are fetched for that and stay in the cache for later readers.

The new manifest describes other data: its hash differs, documents have other numbers, and epoch blocks other rows.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from data_pipeline.shards.local_copies import open_folder
from data_pipeline.shards.manifest import MANIFEST_FILE, WITHOUT, Manifest, length_histogram, sorted_histogram
from data_pipeline.shards.reader import MAX_MAPPED, ShardSet
from data_pipeline.shards.shard_compression import PACKED_FILE
from data_pipeline.stores.client import write_object
from data_pipeline.stores.urls import Location, ObjectPath
from longctx.errors import ConfigError, DataError
from longctx.files import write_atomically


@dataclass(frozen=True, kw_only=True)
class RemovedShards:
    """Result of ``remove_shards``."""

    shards: tuple[str, ...]
    """Removed shards, in the previous manifest's order."""
    documents: int
    """Documents in these shards."""
    tokens: int
    """Tokens in these shards."""
    manifest: Manifest
    """New manifest."""


def remove_shards(folder: str | Path | ObjectPath, shards: Sequence[str]) -> RemovedShards:
    """Rewrite a shard folder's manifest without these shards. No other file is changed or removed.

    The length histogram is recounted from the remaining shards' offsets. Text bytes are scaled with the tokens, because
    shards do not record their own. Counts over the full source (skipped, inexact, duplicates) are kept.

    Raises ConfigError if a name is not in the manifest or no document would remain, and DataError if a remaining shard
    is missing or truncated, or the folder is packed.
    """
    found, manifest, copy = open_folder(folder)
    place: Location = found
    if copy is not None:
        place = copy.origin
    if (place / PACKED_FILE).is_file():
        raise DataError(
            f"{place} is packed, and its list of packed shards depends on its manifest. Leave the shards out of the "
            "original folder, and pack that again (`longctx data pack`)."
        )
    _check_names(shards, manifest, place)
    kept = replace(
        manifest,
        shards=[entry for entry in manifest.shards if entry.file not in shards],
        options={**manifest.options, WITHOUT: sorted({*manifest.options.get(WITHOUT, []), *shards})},
    )
    left_out = [entry for entry in manifest.shards if entry.file in shards]
    if not kept.shards:
        raise ConfigError(
            f"leaving out {', '.join(shards)} would remove all documents from {place}. Build the folder again."
        )
    if copy is not None:
        copy.check_free_space()
    # Opening verifies the remaining shards, so a damaged folder cannot get a new, valid manifest.
    remaining = ShardSet(found, kept, verify=True, max_mapped=MAX_MAPPED, copy=copy)
    # Recount, because the manifest's totals include the removed shards.
    kept = replace(
        kept,
        documents=remaining.num_documents,
        tokens=remaining.num_tokens,
        text_bytes=round(manifest.text_bytes * remaining.num_tokens / max(manifest.tokens, 1)),
        length_histogram=_histogram(remaining),
    )
    if isinstance(place, ObjectPath):
        write_object(place / MANIFEST_FILE, kept.content())
        if copy is not None:
            copy.lend_to(kept)
    else:
        write_atomically(place / MANIFEST_FILE, kept.content())
    return RemovedShards(
        shards=tuple(entry.file for entry in left_out),
        documents=sum(entry.documents for entry in left_out),
        tokens=sum(entry.tokens for entry in left_out),
        manifest=kept,
    )


def _check_names(shards: Sequence[str], manifest: Manifest, place: Location) -> None:
    known = [entry.file for entry in manifest.shards]
    for shard in shards:
        if shard in known:
            continue
        if shard in manifest.options.get(WITHOUT, []):
            raise ConfigError(f"{shard} is already left out of {place}.")
        # Users may give a path or a number instead of a name.
        nearest = get_close_matches(Path(shard).name, known, n=1, cutoff=0)
        raise ConfigError(f"{reprlib.repr(shard)} is not a shard in {place}. Did you mean {', '.join(nearest)}?")


def _histogram(shards: ShardSet) -> dict[str, int]:
    """Count all documents by length, one shard at a time: a large corpus's lengths would fill the memory."""
    counts: Counter[str] = Counter()
    first = 0
    for entry in shards.manifest.shards:
        counts.update(length_histogram(shards.lengths_of(np.arange(first, first + entry.documents))))
        first += entry.documents
    return sorted_histogram(counts)

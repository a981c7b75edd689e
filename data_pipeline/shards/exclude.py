"""``exclude`` and ``include``: put shards of a folder on its list of exclusions, and take them from it."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import xxhash

from data_pipeline.shards.copies import LocalCopy, open_folder
from data_pipeline.shards.exclusions import (
    EXCLUSIONS_FILE,
    MOST_REASON,
    Exclusion,
    Exclusions,
    is_reason,
    lengths_file,
    read_lengths,
)
from data_pipeline.shards.manifest import Manifest, ShardEntry
from data_pipeline.shards.mapped import MappedShard
from data_pipeline.stores.client import remove, write_object
from data_pipeline.stores.urls import Location, ObjectPath
from longctx.errors import ConfigError, DataError
from longctx.files import hash_file, write_atomically


def exclude(folder: str | Path | ObjectPath, shards: Sequence[str], *, reason: str) -> Exclusions:
    """Leave shards of a folder out of every run that opens it from now on; all that is left out then.

    Lengths of their documents are kept beside the list where they can still be read: a run that had planned with them
    then goes on in the middle of a block. ConfigError for names that the manifest does not list.
    """
    if not is_reason(reason):
        raise ConfigError(
            f"reason={reason[: MOST_REASON + 1]!r} must be a line of 1 to {MOST_REASON} characters: whoever reads the "
            "run's log wants to know why."
        )
    found, manifest, copy = open_folder(folder)
    place = _place(found, copy)
    before = Exclusions.load(place, manifest)
    known = {exclusion.shard: exclusion for exclusion in before.shards}
    _check_names(shards, [entry.file for entry in manifest.shards], f"no shard of {place}")
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for entry in manifest.shards:
        if entry.file not in shards:
            continue
        lengths = _kept(place, known.get(entry.file), entry)
        if not lengths:
            lengths = _keep_lengths(found, place, entry, copy)
        # One that is on the list gets the new reason.
        known[entry.file] = Exclusion(shard=entry.file, reason=reason, time=now, lengths=lengths)
    after = _of(manifest, known, place)
    if after.documents == sum(entry.documents for entry in manifest.shards):
        raise ConfigError(f"without {', '.join(shards)} no document of {place} would be left. Build the folder again.")
    # Last: it vouches for the lengths.
    _write(place, EXCLUSIONS_FILE, after.content())
    return after


def include(folder: str | Path | ObjectPath, shards: Sequence[str]) -> Exclusions:
    """Take shards from the list; what is left out then. ConfigError for names that are not on it."""
    found, manifest, copy = open_folder(folder)
    place = _place(found, copy)
    before = Exclusions.load(place, manifest)
    _check_names(shards, [exclusion.shard for exclusion in before.shards], f"not excluded from {place}")
    kept = {exclusion.shard: exclusion for exclusion in before.shards if exclusion.shard not in shards}
    after = _of(manifest, kept, place)
    # The list first: it vouches for lengths that are there.
    if after.shards:
        _write(place, EXCLUSIONS_FILE, after.content())
    else:
        _remove(place, EXCLUSIONS_FILE)
    for shard in shards:
        _remove(place, lengths_file(shard))
    return after


def _place(found: Path, copy: LocalCopy | None) -> Location:
    """Where the list lies: beside the manifest that everybody reads, and not in one host's copy."""
    if copy is None:
        return found
    return copy.origin


def _of(manifest: Manifest, known: dict[str, Exclusion], place: Location) -> Exclusions:
    """The exclusions in the manifest's order."""
    files = [entry.file for entry in manifest.shards]
    return Exclusions(manifest, tuple(known[file] for file in files if file in known), place)


def _check_names(shards: Sequence[str], known: Sequence[str], problem: str) -> None:
    for shard in shards:
        if shard in known:
            continue
        # A path, or a number, is easily given for a name.
        nearest = get_close_matches(Path(shard).name, known, n=1, cutoff=0)
        advice = "There is none."
        if nearest:
            advice = f"Did you mean {nearest[0]}?"
        raise ConfigError(f"{reprlib.repr(shard)} is {problem}. {advice}")


def _kept(place: Location, exclusion: Exclusion | None, entry: ShardEntry) -> str:
    """The checksum of lengths that an earlier exclusion has kept; empty where there are none, or damaged ones."""
    if exclusion is None or not exclusion.lengths:
        return ""
    try:
        read_lengths(place, exclusion, entry.documents, entry.tokens)
    except DataError:
        return ""
    return exclusion.lengths


def _keep_lengths(found: Path, place: Location, entry: ShardEntry, copy: LocalCopy | None) -> str:
    """Write the lengths of a shard's documents and return their checksum; empty where nobody can be sure of them."""
    try:
        if copy is not None:
            copy.bring(entry)
        if not entry.sums and hash_file(found / entry.file) != entry.xxh3_128:
            # Nothing but the whole file's checksum vouches for any part of it.
            return ""
        # Sums vouch for blocks: damage of the tokens leaves the offsets right.
        lengths = MappedShard.open(found, entry, verify=True).lengths_of(np.arange(entry.documents))
    except (DataError, OSError):
        # What cannot be read is why it is excluded.
        return ""
    content = lengths.astype("<i8").tobytes()
    _write(place, lengths_file(entry.file), content)
    return xxhash.xxh3_128_hexdigest(content)


def _write(place: Location, name: str, content: bytes) -> None:
    if isinstance(place, ObjectPath):
        write_object(place / name, content)
    else:
        write_atomically(place / name, content)


def _remove(place: Location, name: str) -> None:
    if isinstance(place, ObjectPath):
        remove(place / name)
    else:
        (place / name).unlink(missing_ok=True)

"""Shards that a run leaves out on purpose: a list beside the manifest which says why, and vouches for itself.

A shard on a dying disk need not end a run: with it on the list (``shards.exclude`` writes it) the shard is neither
opened nor checked, may be damaged or gone, and its documents stand in no row. All others keep their numbers and their
blocks. What was planned while the shard was still read depends on the lengths of its documents, so they are kept beside
the list wherever they could still be read.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from data_pipeline.shards.manifest import MANIFEST_FILE, Manifest, ShardEntry, hash_json, read_object, read_small
from data_pipeline.stores.urls import Location
from longctx.errors import DataError

EXCLUSIONS_FILE = "exclusions.json"
FORMAT = "longctx-exclusions"
VERSION = 1
MOST_REASON = 300
"""Characters of a reason: it stands in logs, in reports and in every record of a run."""

_FIELDS = ("format", "version", "manifest_hash", "shards", "hash")
_HASH = re.compile(r"[0-9a-f]{32}")


def lengths_file(shard: str) -> str:
    """The name of the file with the lengths of an excluded shard's documents."""
    return f"{shard.removesuffix('.arrow')}.lengths"


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """One shard that is left out."""

    shard: str
    """Its file, as the manifest lists it."""
    reason: str
    time: str
    """When it was put on the list, in UTC."""
    lengths: str = ""
    """xxh3_128 of the file with its documents' lengths; empty where nobody could read them any more."""


@dataclass(frozen=True)
class Exclusions:
    """The shards of one folder that are left out, in the manifest's order. None where there is no list."""

    manifest: Manifest
    shards: tuple[Exclusion, ...] = ()
    folder: Location | None = None
    """Where the list lies."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The shards' numbers in the manifest, ascending: what a loader's state says of them."""
        files = {exclusion.shard for exclusion in self.shards}
        return tuple(number for number, entry in enumerate(self.manifest.shards) if entry.file in files)

    @property
    def documents(self) -> int:
        """Documents that are left out with them."""
        return sum(self.manifest.shards[number].documents for number in self.numbers)

    @property
    def tokens(self) -> int:
        """Tokens that are left out with them."""
        return sum(self.manifest.shards[number].tokens for number in self.numbers)

    @property
    def kept(self) -> list[ShardEntry]:
        """The shards that are read."""
        excluded = set(self.numbers)
        return [entry for number, entry in enumerate(self.manifest.shards) if number not in excluded]

    @property
    def kept_documents(self) -> int:
        """Documents that are read."""
        return sum(entry.documents for entry in self.kept)

    def document_numbers(self) -> Iterator[int]:
        """Yield the numbers of the documents that are read, ascending."""
        excluded = set(self.numbers)
        for number, (first, stop) in enumerate(itertools.pairwise(self._first_document)):
            if number not in excluded:
                yield from range(first, stop)

    def are_in(self, documents: np.ndarray, shards: Iterable[int]) -> np.ndarray:
        """Whether each of these documents is in one of the shards of these numbers, bool [n]."""
        found = np.searchsorted(self._first_document, documents, side="right") - 1
        return np.isin(found, np.fromiter(shards, np.int64))

    @cached_property
    def _first_document(self) -> list[int]:
        return list(itertools.accumulate((entry.documents for entry in self.manifest.shards), initial=0))

    @property
    def hash(self) -> str:
        """xxh3_128 of what the list says; empty without one."""
        if not self.shards:
            return ""
        return hash_json(self._body())

    def content(self) -> bytes:
        """The bytes of ``exclusions.json``."""
        body = {**self._body(), "hash": self.hash}
        return json.dumps(body, indent=2, ensure_ascii=False).encode() + b"\n"

    def records(self) -> list[dict[str, Any]]:
        """Each shard with its size, the time, and why, as plain JSON."""
        entries = {entry.file: entry for entry in self.manifest.shards}
        return [
            {
                "shard": exclusion.shard,
                "documents": entries[exclusion.shard].documents,
                "tokens": entries[exclusion.shard].tokens,
                "reason": exclusion.reason,
                "time": exclusion.time,
            }
            for exclusion in self.shards
        ]

    def lines(self) -> list[str]:
        """The same for people, a line each."""
        return [
            f"{found['shard']} ({found['tokens']:,} tokens of {found['documents']:,} documents), {found['time'][:10]}: "
            f"{found['reason'].rstrip('.')}"
            for found in self.records()
        ]

    def lengths_of(self, number: int) -> np.ndarray:
        """Tokens of each document of an excluded shard [n], int64; DataError where nobody knows them."""
        entry = self.manifest.shards[number]
        exclusion = next(exclusion for exclusion in self.shards if exclusion.shard == entry.file)
        assert self.folder is not None
        if not exclusion.lengths:
            raise DataError(
                f"{self.folder / entry.file} is excluded, and its documents' lengths could not be read any more. The "
                "block of rows under way was planned with them: which documents it has left cannot be told.\nPut the "
                "file back, undo the exclusion and exclude it again; or go on at the next block, without the rest of "
                "this one: data.changed_exclusions=next_block."
            )
        return read_lengths(self.folder, exclusion, entry.documents, entry.tokens)

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the lengths that the list vouches for."""
        for number, exclusion in zip(self.numbers, self.shards, strict=True):
            if exclusion.lengths:
                try:
                    self.lengths_of(number)
                except DataError as error:
                    yield str(error)

    @classmethod
    def load(cls, folder: Location, manifest: Manifest) -> Exclusions:
        """Those of a folder with this manifest; DataError where its list is damaged, edited, or another folder's."""
        path = folder / EXCLUSIONS_FILE
        try:
            body = read_object(path)
        except DataError as error:
            # Most folders have no list. A request less than asking before, where the folder is in a store.
            if isinstance(error.__cause__, FileNotFoundError):
                return cls(manifest)
            raise DataError(f"{path} is damaged or cannot be read ({error.__cause__}). {_ADVICE}") from error
        if body.get("format") != FORMAT or body.get("version") != VERSION:
            raise DataError(
                f"{path} is no list of excluded shards of this release (format={body.get('format')!r}, "
                f"version={body.get('version')!r}). {_ADVICE}"
            )
        recorded = body.get("hash")
        # It decides what a run reads, so a list that somebody edited is no list.
        try:
            is_whole = set(body) == set(_FIELDS) and hash_json({key: body[key] for key in _FIELDS[:-1]}) == recorded
        except UnicodeEncodeError:
            # Half of a surrogate pair, which JSON can spell and nobody wrote.
            is_whole = False
        if not is_whole:
            raise DataError(f"{path} was changed after it was written (its hash does not fit). {_ADVICE}")
        if body["manifest_hash"] != manifest.hash:
            raise DataError(
                f"{path} belongs to other data: to a manifest with hash {body['manifest_hash']}, and {MANIFEST_FILE} "
                f"has {manifest.hash}. {_ADVICE}"
            )
        # Anybody can seal a list, and a folder may come from a stranger.
        for problem in _problems(body["shards"], manifest):
            raise DataError(f"{path}: {problem}. {_ADVICE}")
        return cls(manifest, tuple(Exclusion(**values) for values in body["shards"]), folder)

    def _body(self) -> dict[str, Any]:
        shards = [dataclasses.asdict(exclusion) for exclusion in self.shards]
        return {"format": FORMAT, "version": VERSION, "manifest_hash": self.manifest.hash, "shards": shards}


_ADVICE = "Remove the file, which reads all shards again, and give `longctx data exclude` anew."


def _problems(shards: Any, manifest: Manifest) -> Iterator[str]:
    """Yield what cannot be right in a list whose hash is."""
    if not isinstance(shards, list) or not shards:
        yield "it lists no shards"
        return
    known = [entry.file for entry in manifest.shards]
    names = [field.name for field in dataclasses.fields(Exclusion)]
    last = -1
    for values in shards:
        is_entry = isinstance(values, dict) and sorted(values) == sorted(names)
        if not is_entry or not all(type(value) is str for value in values.values()):
            yield f"an entry needs exactly the texts {', '.join(names)}"
            return
        if values["shard"] not in known:
            yield f"{values['shard'][:80]!r} is no shard of {MANIFEST_FILE}"
            return
        if known.index(values["shard"]) <= last:
            yield f"{values['shard']} is listed twice or out of order"
        last = known.index(values["shard"])
        if values["lengths"] and not _HASH.fullmatch(values["lengths"]):
            yield f"{values['shard']}: its lengths have no checksum of 32 hex digits"
        if not is_reason(values["reason"]):
            yield f"{values['shard']}: its reason is no line of text"


def is_reason(text: str) -> bool:
    """Whether it is a line that can stand in a log."""
    return bool(text.strip()) and len(text) <= MOST_REASON and text.isprintable()


def read_lengths(folder: Location, exclusion: Exclusion, documents: int, tokens: int) -> np.ndarray:
    """The lengths that were kept of an excluded shard's documents; DataError where they are not what was written."""
    path = folder / lengths_file(exclusion.shard)
    try:
        content = read_small(path, 8 * documents)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing, though {EXCLUSIONS_FILE} vouches for it. {_LENGTHS_ADVICE}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}). {_LENGTHS_ADVICE}") from error
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}. {_LENGTHS_ADVICE}") from error
    if xxhash.xxh3_128_hexdigest(content) != exclusion.lengths or len(content) != 8 * documents:
        raise DataError(f"{path} is damaged: its checksum is not the one in {EXCLUSIONS_FILE}. {_LENGTHS_ADVICE}")
    lengths = np.frombuffer(content, "<i8").astype(np.int64)
    if int(lengths.min(initial=1)) < 1 or int(lengths.sum()) != tokens:
        raise DataError(f"{path} holds no lengths of {exclusion.shard}. {_LENGTHS_ADVICE}")
    return lengths


_LENGTHS_ADVICE = (
    "Copy it there again; or go on at the next block of rows, without the rest of this one: "
    "data.changed_exclusions=next_block."
)

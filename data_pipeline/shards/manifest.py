"""The manifest of a shard folder: what it holds, of what it was made, and the checksums that prove it."""

from __future__ import annotations

import dataclasses
import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data_pipeline.stores.urls import Location
from longctx.errors import DataError
from longctx.files import check_link, write_synced
from longctx.untrusted import git_lfs
from longctx.untrusted.reading import MOST_JSON_BYTES, NotFetchedError, parse_json, read_bounded
from longctx.untrusted.schema import NAME, Check, anything, listing, mapping, one_of, text, whole

FORMAT = "longctx-shards"
VERSION, MASKED_VERSION = 1, 2
"""Of a folder in which every token counts in the loss, and of one that says which do."""
MANIFEST_FILE = "manifest.json"
LIST_OF_BEFORE = "exclusions.json"
"""A list of excluded shards, which folders had before ``data build --without``."""
VALIDATION_FOLDER = "validation"
"""Within a shard folder, that of the documents it holds out."""
WITHOUT = "without"
"""The option of a build that lists the shards which were left out of the folder afterwards."""
DUPLICATE_COUNTS = ("exact_documents", "exact_bytes", "near_documents", "near_bytes", "groups", "largest_group")
"""What ``Manifest.duplicates`` counts."""


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One Arrow file of the folder."""

    file: str
    bytes: int
    xxh3_128: str
    documents: int
    tokens: int
    sums: str = ""
    """xxh3_128 of the sums of the file's blocks (``shards.sums``); empty in folders of releases without them."""

    num_ids: int = 0
    """One more than the largest id of the file's tokens; 0 in folders of releases that did not record it."""
    counted: int = 0
    """Tokens whose prediction counts in the loss; 0 in a folder in which all do."""

    def to_json(self) -> dict[str, Any]:
        """The object that is written."""
        values = dataclasses.asdict(self)
        # Older folders have none, and their hash must stay what it was.
        for name in ("sums", "num_ids", "counted"):
            if not values[name]:
                del values[name]
        return values


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a shard folder but the tokens. Nothing in it depends on paths, dates or machines."""

    split: str
    """``training`` or ``validation``."""
    vocab_size: int
    padding: int
    """Token id that fills a row."""
    tokenizer: str
    """Fingerprint of the tokenizer whose files lie in the same folder."""
    sources: list[dict[str, Any]]
    """Fingerprints; the shards' ``source`` column is an index into this list."""
    options: dict[str, Any]
    """How the build was asked for."""
    shards: list[ShardEntry]
    documents: int
    tokens: int
    text_bytes: int
    """UTF-8 bytes of the documents' text."""
    length_histogram: dict[str, int]
    """Documents by length in tokens: key ``2^k`` counts lengths of at least 2^k and less than 2^(k+1)."""
    skipped: dict[str, int]
    """What the source left out, by reason."""
    inexact_documents: int = 0
    """Documents whose text does not come back exactly from their ids."""
    left_out: str = ""
    """xxh3_128 of the list of what was left out; empty if there is none."""
    duplicates: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Counts of duplicates, and under ``list`` the xxh3_128 of the list of removed ones; empty if nobody looked."""

    @property
    def bytes_per_token(self) -> float | None:
        """Mean bytes of text that a token stands for, begin and end ids among the tokens; None without a token."""
        if not self.tokens or not self.text_bytes:
            return None
        return self.text_bytes / self.tokens

    @property
    def counted(self) -> int:
        """Tokens whose prediction counts in the loss, of a folder that says which do; 0 if all do."""
        return sum(entry.counted for entry in self.shards)

    @property
    def version(self) -> int:
        """Version of the format."""
        if self.counted:
            return MASKED_VERSION
        return VERSION

    @property
    def files_left_out(self) -> set[str]:
        """Names of the shards that `data build --without` left out, and of their sums: the files may still be there."""
        names = self.options.get(WITHOUT, [])
        return {*names, *(name.removesuffix(".arrow") + ".sums" for name in names)}

    @property
    def has_sums(self) -> bool:
        """Whether there are sums of blocks for every shard, so that a read can check what it touches."""
        return all(entry.sums for entry in self.shards)

    def to_json(self) -> dict[str, Any]:
        """The object that is written, with format, version and its own hash."""
        body = {"format": FORMAT, "version": self.version, **dataclasses.asdict(self)}
        body["shards"] = [entry.to_json() for entry in self.shards]
        # Written where there are some only: most folders have none, and older ones have no such entry.
        if not self.inexact_documents:
            del body["inexact_documents"]
        # Older folders have no such list, and their hash must stay what it was.
        if not self.left_out:
            del body["left_out"]
        if not self.duplicates:
            del body["duplicates"]
        return {**body, "hash": hash_json(body)}

    @cached_property
    def hash(self) -> str:
        """xxh3_128 of the canonical JSON: the identity of the data set."""
        # Once: a loader names it in its state, before and after every step.
        return self.to_json()["hash"]

    def content(self) -> bytes:
        """The bytes of ``manifest.json``."""
        return json.dumps(self.to_json(), indent=2, ensure_ascii=False).encode() + b"\n"

    def save(self, folder: Path) -> None:
        """Write ``manifest.json``."""
        write_synced(folder / MANIFEST_FILE, self.content())

    @classmethod
    def load(cls, folder: Location) -> Manifest:
        """Read and check ``manifest.json``; ``DataError`` if it is missing, damaged, edited or of another version."""
        path = folder / MANIFEST_FILE
        if (folder / LIST_OF_BEFORE).is_file():
            raise DataError(
                f"{folder / LIST_OF_BEFORE} leaves shards out, and this release reads no such list. Remove it to read "
                "all shards; to leave those that it names out for good, remove it and give "
                f"`longctx data build --without SHARD --output {folder}`."
            )
        body = read_object(path)
        if body.get("format") != FORMAT:
            raise DataError(f"{path} is not a shard manifest (format={body.get('format')!r}, wanted {FORMAT!r}).")
        if body.get("version") not in (VERSION, MASKED_VERSION):
            raise DataError(
                f"{path} has format version {body.get('version')!r}; this release reads {VERSION} and "
                f"{MASKED_VERSION}.\n"
                "Build the shards again with this release, or use the release that wrote them."
            )
        recorded = body.pop("hash", None)
        # The manifest holds the shards' checksums, so its own hash vouches for every byte of the folder.
        try:
            is_whole = hash_json(body) == recorded
        except UnicodeEncodeError:
            # Half of a surrogate pair, which JSON can spell and nobody wrote.
            is_whole = False
        if not is_whole:
            raise DataError(f"{path} was changed after it was written (its hash does not fit). Build the shards again.")
        try:
            listed = body.pop("shards")
            if not isinstance(listed, list):
                raise TypeError("shards is no list")
            shards = [ShardEntry(**entry) for entry in listed]
            fields = {name: value for name, value in body.items() if name not in ("format", "version")}
            manifest = cls(shards=shards, **fields)
            if manifest.version != body["version"]:
                raise TypeError(f"version {body['version']} with {manifest.counted} counted tokens")
        except (TypeError, KeyError) as error:
            raise DataError(f"{path} lacks a field or has one too many ({error}). Build the shards again.") from error
        # Anybody can seal a manifest, and a folder may come from a stranger.
        for problem in manifest_problems(manifest):
            raise DataError(f"{path}: {problem}. Take a folder that `longctx data build` wrote.")
        return manifest


def manifest_problems(manifest: Manifest) -> Iterator[str]:
    """Yield what cannot be right whatever the files hold: types, file names, sizes; the first may hide others."""
    yield from _wrong_types("", manifest)
    for name, check in _CHECKS.items():
        try:
            check(getattr(manifest, name), name)
        except ValueError as error:
            yield str(error)
    seen: set[str] = set()
    for number, entry in enumerate(manifest.shards):
        where = f"shards[{number}]"
        yield from _wrong_types(f"{where}.", entry)
        # A name that leads elsewhere would have us read, and name in messages, files of others.
        if not _SHARD_NAME.fullmatch(entry.file):
            yield f"{where}.file={_shown(entry.file)} is no name of a shard in this folder, such as 00000.arrow"
        if entry.counted > entry.tokens:
            yield f"{where}.counted={_shown(entry.counted)} cannot be of {_shown(entry.tokens)} tokens"
        if entry.num_ids > manifest.vocab_size:
            yield f"{where}.num_ids={_shown(entry.num_ids)} is above vocab_size={_shown(manifest.vocab_size)}"
        if entry.file in seen:
            yield f"{entry.file} is listed twice"
        seen.add(entry.file)
        for name in ("xxh3_128", "sums"):
            value = getattr(entry, name)
            if not _HASH.fullmatch(value) and (value or name != "sums"):
                yield f"{where}.{name}={_shown(value)} is no checksum of 32 hex digits"
        # Bounds everything that is reserved or counted by these numbers: the size is compared with the file's.
        if not 1 <= entry.documents <= entry.tokens or 8 * entry.documents + 2 * entry.tokens > entry.bytes:
            yield (
                f"{entry.file} cannot hold {_shown(entry.documents)} documents and {_shown(entry.tokens)} tokens in "
                f"{_shown(entry.bytes)} bytes"
            )
    sums = [entry.file for entry in manifest.shards if entry.sums]
    if sums and not manifest.has_sums:
        yield f"{sums[0]} has sums of its blocks and other shards have none"
    yield from _wrong_duplicates(manifest.duplicates)
    left_out = manifest.options.get(WITHOUT, [])
    if not isinstance(left_out, list) or not all(
        type(name) is str and _SHARD_NAME.fullmatch(name) for name in left_out
    ):
        yield f"options.{WITHOUT}={_shown(left_out)} is no list of names of shards"
    if not 0 <= manifest.padding < manifest.vocab_size <= _MOST_IDS:
        yield f"padding={_shown(manifest.padding)} and vocab_size={_shown(manifest.vocab_size)} cannot be right"


def _wrong_duplicates(found: dict[str, Any]) -> Iterator[str]:
    """Yield what cannot be right in the counts of duplicates, which commands print."""
    if not found:
        return
    counts = {name: value for name, value in found.items() if name != "list"}
    if set(counts) != set(DUPLICATE_COUNTS):
        yield f"duplicates has not the counts {', '.join(DUPLICATE_COUNTS)}"
    for name, value in counts.items():
        if type(value) is not int or value < 0:
            yield f"duplicates.{_shown(name)}={_shown(value)} is no count"
    if "list" in found and not (isinstance(found["list"], str) and _HASH.fullmatch(found["list"])):
        yield f"duplicates.list={_shown(found['list'])} is no checksum of 32 hex digits"


_SHARD_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,120}\.arrow")
_HASH = re.compile(r"[0-9a-f]{32}")
_MOST_IDS = 1 << 32
_COUNTS = mapping(NAME, whole())
_CHECKS: dict[str, Check] = {
    "split": one_of(("training", "validation")),
    "tokenizer": NAME,
    "sources": listing(mapping(NAME, anything)),
    "options": mapping(NAME, anything),
    "length_histogram": mapping(text(r"2\^[0-9]|2\^[1-5][0-9]", "power of two, such as 2^10"), whole()),
    "skipped": _COUNTS,
    "left_out": text(r"([0-9a-f]{32})?", "checksum of 32 hex digits"),
    "documents": whole(),
    "tokens": whole(),
    "text_bytes": whole(),
}
_TYPES = {"str": str, "int": int, "list": list, "dict": dict}


def _wrong_types(prefix: str, values: ShardEntry | Manifest) -> Iterator[str]:
    """Yield the fields of another type than the class says, and counts below zero."""
    for field in dataclasses.fields(values):
        value, wanted = getattr(values, field.name), _TYPES[str(field.type).partition("[")[0]]
        # Not isinstance: true is no number.
        if type(value) is not wanted:
            yield f"{prefix}{field.name}={_shown(value)} is no {wanted.__name__}"
        elif isinstance(value, int) and value < 0:
            yield f"{prefix}{field.name}={_shown(value)} is below 0"


def _shown(value: Any) -> str:
    """A value for a message, whatever a stranger made of it."""
    return reprlib.repr(value)


def hash_json(value: Any) -> str:
    """xxh3_128 of canonical JSON: sorted keys, no spaces, UTF-8."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_128_hexdigest(canonical.encode())


def length_histogram(lengths: Sequence[int] | np.ndarray) -> dict[str, int]:
    """Documents by length, in powers of two, shortest first."""
    # frexp: length = mantissa · 2^exponent with a mantissa of at least one half and below one.
    exponents = np.frexp(np.asarray(lengths, dtype=np.float64))[1] - 1
    counts = np.bincount(exponents)
    return {f"2^{k}": int(count) for k, count in enumerate(counts) if count}


def sorted_histogram(counts: Mapping[str, int]) -> dict[str, int]:
    """The same counts, shortest documents first."""
    return dict(sorted(counts.items(), key=lambda item: int(item[0].removeprefix("2^"))))


def read_object(path: Location) -> dict[str, Any]:
    """The JSON object in a file; ``DataError`` says what stands there instead."""
    content = b""
    try:
        content = read_small(path, MOST_JSON_BYTES)
        body = parse_json(content)
    except FileNotFoundError as error:
        raise DataError(
            f"{path.parent} is not a shard folder: it has no {path.name}.\n"
            "Make one with `longctx data build --source … --tokenizer … --output …`."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        if isinstance(error, NotFetchedError) or git_lfs.is_pointer(content):
            raise DataError(f"{path} is a Git LFS pointer: {git_lfs.ADVICE}.") from error
        raise DataError(f"{path} is damaged: it is not JSON ({error}). Build the shards again.") from error
    if not isinstance(body, dict):
        raise DataError(f"{path} is damaged: it holds no JSON object. Build the shards again.")
    return body


def read_small(path: Location, most_bytes: int) -> bytes:
    """The bytes of a file, here or in a store; ValueError where it has more than ``most_bytes``, or is no file."""
    if isinstance(path, Path):
        if path.is_symlink():
            check_link(path.parent, path.name)
        return read_bounded(path, most_bytes)
    with path.open() as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return content

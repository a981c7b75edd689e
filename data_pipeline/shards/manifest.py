"""Shard folder manifest: its contents, the inputs of its build, and the checksums that prove them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data_pipeline.stores.urls import Location
from longctx.chat.preference import LABELLED
from longctx.errors import DataError
from longctx.files import check_link, write_synced
from longctx.untrusted import git_lfs
from longctx.untrusted.strict_json import MOST_JSON_BYTES, NotFetchedError, parse_json, read_bounded
from longctx.untrusted.untrusted_schema import (
    HASH,
    NAME,
    anything,
    choice_of,
    integer_between,
    list_of,
    mapping,
    record,
    text,
)

FORMAT = "longctx-shards"
VERSION, VERSION_WITH_TARGETS, VERSION_WITH_IMAGES, VERSION_WITH_PREFERENCES = 1, 2, 3, 4
"""Versions for a folder of texts, for one that records target tokens or contains pairs, for images, and for
preferences."""
IMAGES = "images"
"""Folder kind with one image per document; its tokens are pixel values or palette colors."""
PREFERENCES = "preferences"
"""Folder kind with a prompt and two replies per document: the source tokens are the prompt, the tokens the first reply
and then the second."""
MANIFEST_FILE = "manifest.json"
REFERENCES_FILE = "references.arrow"
"""File with a reference model's log-likelihoods, beside the shards (``shards.references``)."""
LIST_OF_BEFORE = "exclusions.json"
"""List of excluded shards, used before ``data build --without``."""
VALIDATION_FOLDER = "validation"
"""Folder with held-out documents, inside a shard folder."""
PARAGRAPHS = "paragraphs"
"""Build option that records each document's paragraph starts."""
WITHOUT = "without"
"""Build option that lists shards removed from the folder after the build."""


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One Arrow file in the folder."""

    file: str
    bytes: int
    xxh3_128: str
    documents: int
    tokens: int
    sums: str = ""
    """xxh3_128 checksum of the file's block checksums (``block_checksum``); empty in folders from older releases."""

    num_ids: int = 0
    """Largest token id in the file plus 1; 0 in folders from releases that did not record it."""
    counted: int = 0
    """Target tokens, whose prediction counts in the loss; 0 in a folder in which all tokens do."""
    source_tokens: int = 0
    """Encoder input tokens, or tokens of prompts; 0 without pairs and preferences."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object to write."""
        return _without_empty(dataclasses.asdict(self), "sums", "num_ids", "counted", "source_tokens")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Shard folder metadata, independent of paths, dates and machines."""

    split: str
    """``training`` or ``validation``."""
    vocab_size: int
    padding: int
    """Token id that fills a row."""
    tokenizer: str
    """Fingerprint of the tokenizer stored in the same folder."""
    sources: list[dict[str, Any]]
    """Source fingerprints; the shards' ``source`` column is an index into this list."""
    options: dict[str, Any]
    """Build options."""
    shards: list[ShardEntry]
    documents: int
    tokens: int
    text_bytes: int
    """UTF-8 bytes in the documents' texts."""
    length_histogram: dict[str, int]
    """Documents by length in tokens: key ``2^k`` counts lengths of at least 2^k and less than 2^(k+1)."""
    skipped: dict[str, int]
    """Skipped records by reason."""
    inexact_documents: int = 0
    """Documents that do not decode exactly to their text."""
    left_out: str = ""
    """xxh3_128 checksum of the list of skips; empty without skips."""
    duplicates: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Duplicate counts, and under ``list`` the xxh3_128 checksum of the removed ones' list; empty without a search."""
    kind: str = ""
    """``images`` or ``preferences``; empty for texts."""

    @property
    def is_preferences(self) -> bool:
        """True if every document is a prompt with two replies."""
        return self.kind == PREFERENCES

    @property
    def has_labelled_replies(self) -> bool:
        """True if every record is one reply with a label; its second reply then belongs to another prompt."""
        return self.is_preferences and self.options.get(PREFERENCES) == LABELLED

    @property
    def is_images(self) -> bool:
        """True if every document is an image."""
        return self.kind == IMAGES

    @property
    def bytes_per_token(self) -> float | None:
        """Mean text bytes per token, counting begin and end ids as tokens; None without tokens."""
        if not self.tokens or not self.text_bytes:
            return None
        return self.text_bytes / self.tokens

    @property
    def num_targets(self) -> int:
        """Target tokens, if the folder records them; 0 if every token is a target."""
        return sum(entry.counted for entry in self.shards)

    @property
    def source_tokens(self) -> int:
        """Encoder input tokens, or tokens of prompts; 0 without pairs and preferences."""
        return sum(entry.source_tokens for entry in self.shards)

    @property
    def has_sources(self) -> bool:
        """True if the folder contains pairs: documents with an encoder input each."""
        return self.source_tokens > 0 and not self.is_preferences

    @property
    def has_paragraphs(self) -> bool:
        """True if the folder records where paragraphs start."""
        return bool(self.options.get(PARAGRAPHS))

    @property
    def version(self) -> int:
        """Format version."""
        # Readers of earlier versions would take pixels for text.
        if self.is_images:
            return VERSION_WITH_IMAGES
        # … and would take prompts for encoder input.
        if self.is_preferences:
            return VERSION_WITH_PREFERENCES
        # Readers of version 1 would train on every token in these folders, so they must refuse them.
        if self.num_targets or self.source_tokens:
            return VERSION_WITH_TARGETS
        return VERSION

    @property
    def files_left_out(self) -> set[str]:
        """Shards removed by `data build --without`, and their checksum files: the files may still exist."""
        names = self.options.get(WITHOUT, [])
        return {*names, *(name.removesuffix(".arrow") + ".sums" for name in names)}

    @property
    def has_block_checksum(self) -> bool:
        """True if every shard has block checksums, so that reads can be verified."""
        return all(entry.sums for entry in self.shards)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object to write, with format, version and its own hash."""
        body = {"format": FORMAT, "version": self.version, **dataclasses.asdict(self)}
        body["shards"] = [entry.to_json() for entry in self.shards]
        body = _without_empty(body, "inexact_documents", "left_out", "duplicates", "kind")
        return {**body, "hash": hash_json(body)}

    @cached_property
    def hash(self) -> str:
        """xxh3_128 of the canonical JSON: the data set's identity."""
        # Cached, because the loader includes it in its state before and after every step.
        return self.to_json()["hash"]

    def content(self) -> bytes:
        """Return the content of ``manifest.json``."""
        return json.dumps(self.to_json(), indent=2, ensure_ascii=False).encode() + b"\n"

    def save(self, folder: Path) -> None:
        """Write ``manifest.json``."""
        write_synced(folder / MANIFEST_FILE, self.content())

    @classmethod
    def load(cls, folder: Location) -> Manifest:
        """Read and check ``manifest.json``.

        Raises ``DataError`` if it is missing, damaged, edited or from another version.
        """
        path = folder / MANIFEST_FILE
        if (folder / LIST_OF_BEFORE).is_file():
            raise DataError(
                f"{folder / LIST_OF_BEFORE} lists excluded shards, which this release does not support. Remove it to "
                "read all shards; to leave the listed shards out permanently, remove it and run "
                f"`longctx data build --without SHARD --output {folder}`."
            )
        body = read_json_object(path)
        if body.get("format") != FORMAT:
            raise DataError(f"{path} is not a shard manifest (format={body.get('format')!r}, expected {FORMAT!r}).")
        if body.get("version") not in range(VERSION, VERSION_WITH_PREFERENCES + 1):
            raise DataError(
                f"{path} has format version {body.get('version')!r}; this release reads {VERSION} to "
                f"{VERSION_WITH_PREFERENCES}.\n"
                "Build the shards again with this release, or use the release that wrote them."
            )
        # The manifest contains the shards' checksums, so its own hash covers every byte in the folder.
        if not take_hash(body):
            raise DataError(f"{path} was changed after it was written (hash mismatch). Build the shards again.")
        # The hash proves integrity, not origin: a folder may come from an untrusted source, so check every value.
        try:
            return _parse_manifest(body)
        except ValueError as error:
            raise DataError(f"{path}: {error}. Use a folder written by `longctx data build`.") from error


def _without_empty(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """Drop the empty values among these names."""
    # Older folders lack them, and their hash must not change.
    return {name: value for name, value in values.items() if value or name not in names}


def _parse_manifest(body: dict[str, Any]) -> Manifest:
    """Build the manifest from its JSON; raise ValueError for values that are invalid whatever the files contain."""
    _CHECK(body, "")
    version = body.pop("version")
    del body["format"]
    shards = [ShardEntry(**entry) for entry in body.pop("shards")]
    manifest = Manifest(shards=shards, **body)
    # Unlike other options, these names become file names.
    list_of(SHARD_NAME)(manifest.options.get(WITHOUT, []), f"options.{WITHOUT}")
    for problem in _contradictions(manifest, version):
        raise ValueError(problem)
    return manifest


def take_hash(body: dict[str, Any]) -> bool:
    """Remove the hash from a parsed file; return whether it matches the rest."""
    recorded = body.pop("hash", None)
    try:
        return hash_json(body) == recorded
    except UnicodeEncodeError:
        # Half a surrogate pair, which JSON can contain but no release writes.
        return False


def _contradictions(manifest: Manifest, version: int) -> Iterator[str]:
    """Yield inconsistencies between values that are individually valid."""
    if manifest.version != version:
        kind = manifest.kind or "texts"
        yield f"version={version} does not allow {manifest.num_targets} counted tokens in a folder of {kind}"
    seen: set[str] = set()
    for number, entry in enumerate(manifest.shards):
        where = f"shards[{number}]"
        if entry.counted > entry.tokens:
            yield f"{where}.counted={entry.counted} exceeds its {entry.tokens} tokens"
        if entry.num_ids > manifest.vocab_size:
            yield f"{where}.num_ids={entry.num_ids} is above vocab_size={manifest.vocab_size}"
        if entry.file in seen:
            yield f"{entry.file} is listed twice"
        seen.add(entry.file)
        # This bounds all allocations based on these numbers: the entry's size is compared with the file's.
        if not 1 <= entry.documents <= entry.tokens or _least_bytes(manifest, entry) > entry.bytes:
            yield (
                f"{entry.file} cannot hold {entry.documents} documents and {entry.tokens} tokens in {entry.bytes} bytes"
            )
        if entry.source_tokens and entry.source_tokens < entry.documents:
            yield f"{entry.file} cannot hold {entry.documents} pairs with {entry.source_tokens} source tokens"
    sums = [entry.file for entry in manifest.shards if entry.sums]
    if sums and not manifest.has_block_checksum:
        yield f"{sums[0]} has block checksums, but other shards do not"
    if len({bool(entry.source_tokens) for entry in manifest.shards}) > 1:
        yield "only some shards contain pairs"
    if manifest.is_images:
        yield from _image_contradictions(manifest)
    if manifest.is_preferences:
        yield from _preference_contradictions(manifest)
    if manifest.padding >= manifest.vocab_size:
        yield f"padding={manifest.padding} must be below vocab_size={manifest.vocab_size}"


def _image_contradictions(manifest: Manifest) -> Iterator[str]:
    """Yield inconsistencies in a folder of images, which all have the same length."""
    lengths = {entry.tokens / max(entry.documents, 1) for entry in manifest.shards}
    if len(lengths) > 1 or any(entry.tokens % max(entry.documents, 1) for entry in manifest.shards):
        yield "its images differ in their number of tokens"
    if manifest.num_targets or manifest.source_tokens:
        yield "a folder of images has neither counted nor source tokens"
    if manifest.vocab_size > 1 << 16:
        yield f"vocab_size={manifest.vocab_size} is above the most for images, {1 << 16}"


def _preference_contradictions(manifest: Manifest) -> Iterator[str]:
    """Yield inconsistencies in a folder of preferences, which all have a prompt and two replies."""
    for entry in manifest.shards:
        if not entry.source_tokens or entry.tokens < 2 * entry.documents:
            yield f"{entry.file} cannot hold a prompt and two replies for each of {entry.documents} records"
    if manifest.num_targets:
        yield "a folder of preferences lists no counted tokens: all tokens of its replies count"


def _least_bytes(manifest: Manifest, entry: ShardEntry) -> int:
    """Return the minimum bytes for a file's offsets and ids."""
    num_columns = 2 if entry.source_tokens else 1
    id_bytes = 1 if manifest.is_images else 2
    return 8 * num_columns * entry.documents + id_bytes * (entry.tokens + entry.source_tokens)


SHARD_NAME = text(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,120}\.arrow", "name of a shard in this folder, such as 00000.arrow")
"""Restricted to plain names: any other name could make us read unrelated files and name them in messages."""
_MOST_IDS = 1 << 32
# Schema for untrusted input: unknown keys and values out of range are rejected before use.
_SHARD = record(
    {
        "file": SHARD_NAME,
        "bytes": integer_between(),
        "xxh3_128": HASH,
        "documents": integer_between(),
        "tokens": integer_between(),
    },
    {"sums": HASH, "num_ids": integer_between(), "counted": integer_between(), "source_tokens": integer_between()},
)
_DUPLICATE_COUNTS = ("exact_documents", "exact_bytes", "near_documents", "near_bytes", "groups", "largest_group")
_CHECK = record(
    {
        "format": choice_of((FORMAT,)),
        "version": integer_between(),
        "split": choice_of(("training", "validation")),
        "vocab_size": integer_between(1, _MOST_IDS),
        "padding": integer_between(),
        "tokenizer": NAME,
        "sources": list_of(mapping(NAME, anything)),
        "options": mapping(NAME, anything),
        "shards": list_of(_SHARD),
        "documents": integer_between(),
        "tokens": integer_between(),
        "text_bytes": integer_between(),
        "length_histogram": mapping(text(r"2\^[0-9]|2\^[1-5][0-9]", "power of two, such as 2^10"), integer_between()),
        "skipped": mapping(NAME, integer_between()),
    },
    {
        "inexact_documents": integer_between(),
        "left_out": text(r"([0-9a-f]{32})?", "checksum of 32 hex digits"),
        "duplicates": record(dict.fromkeys(_DUPLICATE_COUNTS, integer_between()), {"list": HASH}),
        "kind": choice_of((IMAGES, PREFERENCES)),
    },
)


def hash_json(value: Any) -> str:
    """Return the xxh3_128 checksum of canonical JSON: sorted keys, no spaces, UTF-8."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_128_hexdigest(canonical.encode())


def length_histogram(lengths: Sequence[int] | np.ndarray) -> dict[str, int]:
    """Count documents by length, in powers of two, shortest first."""
    # frexp: length = mantissa · 2^exponent with mantissa in [0.5, 1).
    powers = np.frexp(np.asarray(lengths, dtype=np.float64))[1] - 1
    counts = np.bincount(powers)
    return {f"2^{k}": int(count) for k, count in enumerate(counts) if count}


def sorted_histogram(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the same counts, shortest documents first."""
    return dict(sorted(counts.items(), key=lambda item: int(item[0].removeprefix("2^"))))


def read_json_object(path: Location) -> dict[str, Any]:
    """Return the JSON object in a file; raise ``DataError`` with the reason if there is none."""
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
            raise DataError(f"{path} is a Git LFS pointer: {git_lfs.FETCH_HINT}.") from error
        raise DataError(f"{path} is damaged: it is not JSON ({error}). Build the shards again.") from error
    if not isinstance(body, dict):
        raise DataError(f"{path} is damaged: it is not a JSON object. Build the shards again.")
    return body


def read_small(path: Location, most_bytes: int) -> bytes:
    """Return a file's bytes, local or in a store; raise ValueError if it is too large or not a file."""
    if isinstance(path, Path):
        if path.is_symlink():
            check_link(path.parent, path.name)
        return read_bounded(path, most_bytes)
    with path.open() as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return content

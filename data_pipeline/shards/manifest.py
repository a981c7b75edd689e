"""The manifest of a shard folder: what it holds, of what it was made, and the checksums that prove it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from longctx.errors import DataError
from longctx.files import write_synced

FORMAT = "longctx-shards"
VERSION = 1
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One Arrow file of the folder."""

    file: str
    bytes: int
    xxh3_128: str
    documents: int
    tokens: int


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

    @property
    def bytes_per_token(self) -> float | None:
        """Mean bytes of text that a token stands for, begin and end ids among the tokens; None without a token."""
        if not self.tokens or not self.text_bytes:
            return None
        return self.text_bytes / self.tokens

    def to_json(self) -> dict[str, Any]:
        """The object that is written, with format, version and its own hash."""
        body = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        # Written where there are some only: most folders have none, and older ones have no such entry.
        if not self.inexact_documents:
            del body["inexact_documents"]
        # Older folders have no such list, and their hash must stay what it was.
        if not self.left_out:
            del body["left_out"]
        return {**body, "hash": hash_json(body)}

    @cached_property
    def hash(self) -> str:
        """xxh3_128 of the canonical JSON: the identity of the data set."""
        # Once: a loader names it in its state, before and after every step.
        return self.to_json()["hash"]

    def save(self, folder: Path) -> None:
        """Write ``manifest.json``."""
        content = json.dumps(self.to_json(), indent=2, ensure_ascii=False)
        write_synced(folder / MANIFEST_FILE, content.encode() + b"\n")

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read and check ``manifest.json``; ``DataError`` if it is missing, damaged, edited or of another version."""
        path = folder / MANIFEST_FILE
        body = _read_object(path)
        if body.get("format") != FORMAT:
            raise DataError(f"{path} is not a shard manifest (format={body.get('format')!r}, wanted {FORMAT!r}).")
        if body.get("version") != VERSION:
            raise DataError(
                f"{path} has format version {body.get('version')!r}; this release reads {VERSION}.\n"
                "Build the shards again with this release, or use the release that wrote them."
            )
        recorded = body.pop("hash", None)
        # The manifest holds the shards' checksums, so its own hash vouches for every byte of the folder.
        if hash_json(body) != recorded:
            raise DataError(f"{path} was changed after it was written (its hash does not fit). Build the shards again.")
        try:
            shards = [ShardEntry(**entry) for entry in body.pop("shards")]
            fields = {name: value for name, value in body.items() if name not in ("format", "version")}
            return cls(shards=shards, **fields)
        except (TypeError, KeyError) as error:
            raise DataError(f"{path} lacks a field or has one too many ({error}). Build the shards again.") from error


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


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ``DataError`` says what stands there instead."""
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise DataError(
            f"{path.parent} is not a shard folder: it has no {path.name}.\n"
            "Make one with `longctx data build --source … --tokenizer … --output …`."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise DataError(f"{path} is damaged: it is not JSON ({error}). Build the shards again.") from error
    if not isinstance(body, dict):
        raise DataError(f"{path} is damaged: it holds no JSON object. Build the shards again.")
    return body

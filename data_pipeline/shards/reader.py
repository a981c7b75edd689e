"""Shards: tokenized documents in Arrow files that are memory-mapped, checksummed and readable by plain pyarrow.

Each ``NNNNN.arrow`` is an Arrow IPC file with one record batch, a row a document: ``tokens`` (large_list of uint16 or
uint32, by vocabulary), ``source`` (int16), ``hash`` (uint64, xxh3_64 of the text), ``name`` (string).
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from data_pipeline.files import hash_file
from data_pipeline.manifest import MANIFEST_FILE, TOKENIZER_FILE, Manifest, ShardEntry, length_histogram
from data_pipeline.tokenizer import Tokenizer
from longctx.errors import DataError

DEFAULT_SHARD_TOKENS = 1 << 26
"""Tokens after which a shard is closed: 128 MiB at two bytes a token. A document is never cut."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id below ``vocab_size``."""
    return np.dtype(np.uint16) if vocab_size <= 1 << 16 else np.dtype(np.uint32)


@dataclass(frozen=True, kw_only=True)
class EncodedDocument:
    """One row of a shard."""

    tokens: np.ndarray
    hash: int
    name: str
    text_bytes: int
    source: int = 0


class ShardWriter:
    """Writes documents into ``folder`` shard by shard; ``finish`` writes the manifest and returns it.

    The folder must exist and be empty. It is a shard folder only once ``finish`` has returned, so write into a
    temporary folder (``files.staged_folder``).
    """

    def __init__(self, folder: Path, *, vocab_size: int, shard_tokens: int = DEFAULT_SHARD_TOKENS) -> None:
        if shard_tokens < 1:
            raise DataError(f"shard_tokens={shard_tokens} must be at least 1. Try {DEFAULT_SHARD_TOKENS}.")
        self._folder = folder
        self._vocab_size = vocab_size
        self._shard_tokens = shard_tokens
        self._open: list[EncodedDocument] = []
        self._open_tokens = 0
        self._entries: list[ShardEntry] = []
        self._lengths: list[int] = []
        self._text_bytes = 0

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens added so far."""
        return sum(entry.tokens for entry in self._entries) + self._open_tokens

    def add(self, document: EncodedDocument) -> None:
        """Appends a document; closes the shard before it would grow beyond ``shard_tokens``."""
        tokens = document.tokens
        if not len(tokens):
            raise DataError(f"{document.name} has no tokens. Leave empty documents out.")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size:
            raise DataError(
                f"{document.name} has id {int(tokens.max())} (lowest {int(tokens.min())}), "
                f"outside the vocabulary of {self._vocab_size}. Encode it with the tokenizer of this folder."
            )
        if self._open and self._open_tokens + len(tokens) > self._shard_tokens:
            self._close_shard()
        self._open.append(document)
        self._open_tokens += len(tokens)
        self._lengths.append(len(tokens))
        self._text_bytes += document.text_bytes

    def finish(
        self,
        *,
        split: str,
        tokenizer: Tokenizer,
        sources: list[dict[str, Any]],
        options: Mapping[str, Any],
        skipped: Mapping[str, int],
    ) -> Manifest:
        """Writes the last shard and the manifest and returns the manifest."""
        if self._open:
            self._close_shard()
        manifest = Manifest(
            split=split,
            vocab_size=self._vocab_size,
            padding=tokenizer.padding,
            tokenizer=tokenizer.fingerprint,
            sources=sources,
            options=dict(options),
            shards=self._entries,
            documents=self.num_documents,
            tokens=self.num_tokens,
            text_bytes=self._text_bytes,
            length_histogram=length_histogram(self._lengths),
            skipped=dict(skipped),
        )
        manifest.save(self._folder)
        return manifest

    def _close_shard(self) -> None:
        path = self._folder / f"{len(self._entries):05d}.arrow"
        batch = _record_batch(self._open, token_dtype(self._vocab_size))
        with path.open("wb") as file:
            with pa.ipc.new_file(file, batch.schema) as writer:
                writer.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())
        entry = ShardEntry(
            file=path.name,
            bytes=path.stat().st_size,
            xxh3_128=hash_file(path),
            documents=len(self._open),
            tokens=self._open_tokens,
        )
        self._entries.append(entry)
        self._open, self._open_tokens = [], 0


class ShardSet:
    """A shard folder opened for reading: all documents by number, as views into memory-mapped files."""

    def __init__(self, folder: Path, manifest: Manifest, shards: list[_Shard]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.lengths: np.ndarray = np.concatenate([np.empty(0, np.int64), *(np.diff(s.offsets) for s in shards)])
        """Tokens of each document, int64."""
        self._shards = shards
        self._first_document = [0, *accumulate(len(s.offsets) - 1 for s in shards)]

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = True) -> ShardSet:
        """Opens a folder; ``DataError`` names the file that is missing, truncated or damaged.

        Sizes, offsets and counts are always checked; ``verify`` also reads every byte to check the checksums.
        """
        folder = Path(folder)
        manifest = Manifest.load(folder)
        return cls(folder, manifest, [_open_shard(folder, entry, verify=verify) for entry in manifest.shards])

    @classmethod
    def open_one(cls, folder: Path, manifest: Manifest, entry: ShardEntry) -> ShardSet:
        """A set of one shard of the folder, checksum verified: for looking at damage file by file."""
        return cls(folder, manifest, [_open_shard(folder, entry, verify=True)])

    @property
    def num_documents(self) -> int:
        """Documents in all shards."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards, document begins and ends included."""
        return int(self.lengths.sum())

    def document(self, index: int) -> np.ndarray:
        """All tokens of document ``index``, a read-only view (uint16 or uint32)."""
        shard, row = self._place(index)
        return shard.values[shard.offsets[row] : shard.offsets[row + 1]]

    def slice(self, index: int, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop`` of document ``index``, a read-only view; only those pages are touched."""
        return self.document(index)[start:stop]

    def name(self, index: int) -> str:
        """The name of document ``index`` in its source."""
        shard, row = self._place(index)
        return shard.batch.column("name")[row].as_py()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the folder; ``DataError`` if the file beside the shards is another one."""
        tokenizer = Tokenizer.load(self.folder / TOKENIZER_FILE)
        if tokenizer.fingerprint != self.manifest.tokenizer:
            raise DataError(
                f"{tokenizer.path} is not the tokenizer that made these shards "
                f"(xxh3_128 {tokenizer.fingerprint}, wanted {self.manifest.tokenizer}). Put the original back."
            )
        return tokenizer

    def shard_tokens(self, number: int) -> np.ndarray:
        """All tokens of one shard, one document after the other, as a read-only view."""
        return self._shards[number].values

    def _place(self, index: int) -> tuple[_Shard, int]:
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        number = bisect.bisect_right(self._first_document, index) - 1
        return self._shards[number], index - self._first_document[number]


@dataclass(frozen=True)
class _Shard:
    batch: pa.RecordBatch
    offsets: np.ndarray
    values: np.ndarray


def _record_batch(documents: list[EncodedDocument], dtype: np.dtype) -> pa.RecordBatch:
    offsets = np.zeros(len(documents) + 1, dtype=np.int64)
    np.cumsum([len(document.tokens) for document in documents], out=offsets[1:])
    values = np.concatenate([document.tokens.astype(dtype) for document in documents])
    return pa.record_batch(
        {
            "tokens": pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values)),
            "source": pa.array([document.source for document in documents], pa.int16()),
            "hash": pa.array([document.hash for document in documents], pa.uint64()),
            "name": pa.array([document.name for document in documents], pa.string()),
        }
    )


def _open_shard(folder: Path, entry: ShardEntry, *, verify: bool) -> _Shard:
    path = folder / entry.file
    advice = "Copy the shard again or build the folder again."
    try:
        if path.stat().st_size != entry.bytes:
            raise DataError(
                f"{path} has {path.stat().st_size} bytes where {MANIFEST_FILE} says {entry.bytes}. {advice}"
            )
        mapped = pa.memory_map(str(path))
        if verify and xxhash.xxh3_128_hexdigest(mapped.read_buffer()) != entry.xxh3_128:
            raise DataError(f"{path} is damaged: its checksum is not the one in {MANIFEST_FILE}. {advice}")
        mapped.seek(0)
        return _views(pa.ipc.open_file(mapped).get_batch(0), entry, path)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing, though {MANIFEST_FILE} lists it. {advice}") from error
    except (OSError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as an Arrow shard ({error}). {advice}") from error


def _views(batch: pa.RecordBatch, entry: ShardEntry, path: Path) -> _Shard:
    """Numpy views of offsets and tokens, without copying, after a check that they can be right."""
    tokens = batch.column("tokens")
    offsets = tokens.offsets.to_numpy(zero_copy_only=True)
    values = tokens.values.to_numpy(zero_copy_only=True)
    ascending = bool((np.diff(offsets) > 0).all()) and offsets[0] == 0 and offsets[-1] == len(values)
    if not ascending or len(offsets) - 1 != entry.documents or len(values) != entry.tokens:
        raise DataError(
            f"{path} does not hold the {entry.documents} documents and {entry.tokens} tokens "
            f"that {MANIFEST_FILE} lists. Build the folder again."
        )
    return _Shard(batch, offsets, values)

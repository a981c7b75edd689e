"""Writes documents into Arrow files."""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from data_pipeline.shards.block_checksum import checksum_blocks, checksum_file
from data_pipeline.shards.manifest import IMAGES, PREFERENCES, Manifest, ShardEntry
from data_pipeline.shards.mapped import LABEL, PARAGRAPHS, SECOND, SOURCE, TARGET_RUNS
from longctx.errors import DataError
from longctx.files import write_synced
from longctx.tokenizer.tokenizer_base import Tokenizer

DEFAULT_SHARD_TOKENS = 1 << 26
"""Tokens after which a shard is closed: 128 MiB at two bytes per token. Documents are never cut."""


_GROWTH_TOKENS = 1 << 22
"""Extra tokens allocated whenever a shard's token memory grows."""


def token_dtype(vocab_size: int, *, images: bool = False) -> np.dtype:
    """Return the smallest dtype that holds every id below ``vocab_size``: uint16 or uint32; for images also uint8."""
    # Texts never use uint8, which readers of version 1 do not accept.
    if images and vocab_size <= 1 << 8:
        return np.dtype(np.uint8)
    if vocab_size <= 1 << 16:
        return np.dtype(np.uint16)
    return np.dtype(np.uint32)


@dataclass(frozen=True, kw_only=True)
class EncodedDocument:
    """One row in a shard."""

    tokens: np.ndarray
    hash: int
    name: str
    text_bytes: int
    source: int = 0
    target_runs: np.ndarray | None = None
    """Spans of target tokens as bounds: each span's first token and end (exclusive), span after span, int64 [2 ·
    spans], strictly ascending. None in a folder in which every token is a target.
    """

    paragraphs: np.ndarray | None = None
    """Starts of its paragraphs but the first, int64, strictly ascending. None in a folder without paragraphs."""
    source_tokens: np.ndarray | None = None
    """Encoder input for a pair, or the prompt of two replies; None without pairs and preferences."""
    label: int | None = None
    """Class index of an image, -1 in a folder without classes; 1 or 0 for preferences; None for a text."""
    second: int | None = None
    """Start of the second reply in ``tokens``; None without preferences."""

    @property
    def num_targets(self) -> int:
        """Number of target tokens; 0 without a mask."""
        if self.target_runs is None:
            return 0
        return int(self.target_runs[1::2].sum() - self.target_runs[::2].sum())


def runs_of(target_mask: np.ndarray) -> np.ndarray:
    """Convert a mask, bool [N], to spans in the format of ``EncodedDocument.target_runs``."""
    return np.flatnonzero(np.diff(target_mask.astype(np.int8), prepend=0, append=0)).astype(np.int64)


class ShardWriter:
    """Writes documents into ``folder`` shard by shard; ``finish`` writes the manifest and returns it.

    The folder must exist and be empty. It is a shard folder only once ``finish`` has returned; therefore write into a
    temporary folder (``files.staged_folder``).
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        shard_tokens: int = DEFAULT_SHARD_TOKENS,
        masked: bool = False,
        pairs: bool = False,
        paragraphs: bool = False,
        images: bool = False,
        preferences: bool = False,
    ) -> None:
        """Initialize the writer with the optional columns that every document must have.

        ``masked``: target tokens; ``pairs``: a source; ``paragraphs``: paragraph starts; ``images``: a label;
        ``preferences``: a source, a label and the start of the second reply.
        """
        if shard_tokens < 1:
            raise DataError(f"shard_tokens={shard_tokens} must be at least 1. Try {DEFAULT_SHARD_TOKENS}.")
        self._folder = folder
        self._vocab_size = vocab_size
        self._shard_tokens = shard_tokens
        self._kind = ""
        if images:
            self._kind = IMAGES
        elif preferences:
            self._kind = PREFERENCES
        dtype = token_dtype(vocab_size, images=images)
        self._open = _OpenShard(
            dtype,
            masked=masked,
            pairs=pairs or preferences,
            paragraphs=paragraphs,
            labels=images or preferences,
            seconds=preferences,
        )
        self._entries: list[ShardEntry] = []
        # Document counts by bit length of the token count: the only length statistics in the manifest.
        self._by_bits = [0] * 64
        self._text_bytes = 0

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return sum(self._by_bits)

    @property
    def num_tokens(self) -> int:
        """Tokens added so far."""
        return sum(entry.tokens for entry in self._entries) + self._open.tokens

    @property
    def text_bytes(self) -> int:
        """UTF-8 text bytes added so far."""
        return self._text_bytes

    @property
    def length_histogram(self) -> dict[str, int]:
        """Documents added so far by length, in the format of ``Manifest.length_histogram``."""
        return {f"2^{k}": count for k, count in enumerate(self._by_bits) if count}

    def add(self, document: EncodedDocument) -> None:
        """Append a document; close the shard first if it would grow beyond ``shard_tokens``."""
        tokens = document.tokens
        self._check(document, tokens)
        if document.source_tokens is not None:
            self._check(document, document.source_tokens)
        # Close before adding: only a single document can make a shard exceed the limit.
        if len(self._open) and self._open.tokens + len(tokens) > self._shard_tokens:
            self._close_shard()
        self._open.add(document)
        # bit_length − 1 = ⌊log2 n⌋, the histogram's key.
        self._by_bits[len(tokens).bit_length() - 1] += 1
        self._text_bytes += document.text_bytes

    def _check(self, document: EncodedDocument, tokens: np.ndarray) -> None:
        """Raise DataError for tokens that a shard cannot hold."""
        if not len(tokens):
            raise DataError(f"{document.name} has no tokens. Leave empty documents out.")
        # Ids are stored in a small unsigned type: an id out of range would be read back as another one.
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size:
            raise DataError(
                f"{document.name} has id {int(tokens.max())} (lowest {int(tokens.min())}), "
                f"outside the vocabulary of {self._vocab_size}. Encode it with the tokenizer of this folder."
            )

    @property
    def shards(self) -> list[ShardEntry]:
        """Shards written so far."""
        return list(self._entries)

    def close(self) -> None:
        """Write the last shard without a manifest, for callers that write one manifest for several folders."""
        if len(self._open):
            self._close_shard()

    def finish(
        self,
        *,
        split: str,
        tokenizer: Tokenizer,
        sources: list[dict[str, Any]],
        options: Mapping[str, Any],
        skipped: Mapping[str, int],
        mismatched_documents: int = 0,
        left_out: str = "",
    ) -> Manifest:
        """Write the last shard and the manifest, and return the manifest."""
        # The manifest comes last: a folder without one is not a shard folder.
        self.close()
        manifest = Manifest(
            split=split,
            vocab_size=self._vocab_size,
            padding=tokenizer.padding,
            tokenizer=tokenizer.fingerprint,
            sources=sources,
            options=dict(options),
            shards=self.shards,
            documents=self.num_documents,
            tokens=self.num_tokens,
            text_bytes=self._text_bytes,
            length_histogram=self.length_histogram,
            skipped=dict(skipped),
            inexact_documents=mismatched_documents,
            left_out=left_out,
            kind=self._kind,
        )
        manifest.save(self._folder)
        return manifest

    def _close_shard(self) -> None:
        """Write the pending documents as the next file, and then its block checksums."""
        path = self._folder / f"{len(self._entries):05d}.arrow"
        batch = self._open.record_batch()
        with path.open("wb") as file:
            with pa.ipc.new_file(file, batch.schema) as writer:
                writer.write_batch(batch)
            # Sync before the manifest that covers the file is written.
            file.flush()
            os.fsync(file.fileno())
        whole, sums = checksum_blocks(path)
        write_synced(path.with_name(checksum_file(path.name)), sums.tobytes())
        entry = ShardEntry(
            file=path.name,
            bytes=path.stat().st_size,
            xxh3_128=whole,
            documents=len(self._open),
            tokens=self._open.tokens,
            sums=xxhash.xxh3_128_hexdigest(sums.tobytes()),
            num_ids=self._open.largest_id + 1,
            counted=self._open.num_targets,
            source_tokens=self._open.source.tokens if self._open.source else 0,
        )
        self._entries.append(entry)
        self._open.clear()


class _OpenColumn:
    """Token ids for one side of a shard's pending documents, stored once, in one array."""

    def __init__(self, dtype: np.dtype) -> None:
        self._values, self._lengths = np.empty(0, dtype), array("q")
        self.tokens = 0

    def add(self, tokens: np.ndarray) -> None:
        """Append a row."""
        stop = self.tokens + len(tokens)
        if stop > len(self._values):
            # Grow in place: memory holds the tokens once, not once per document and again in one array. No other views
            # of the array exist between two shards.
            self._values.resize(stop + _GROWTH_TOKENS, refcheck=False)
        self._values[self.tokens : stop] = tokens
        self.tokens = stop
        self._lengths.append(len(tokens))

    def column(self) -> pa.Array:
        """Return all rows, as a view."""
        return _lists(self._lengths, self._values[: self.tokens])

    def clear(self) -> None:
        """Remove all rows and keep the memory."""
        self.tokens, self._lengths = 0, array("q")


class _OpenLists:
    """Number lists for a shard's pending documents."""

    def __init__(self) -> None:
        self._numbers, self._lengths = array("q"), array("q")

    def add(self, numbers: np.ndarray) -> None:
        """Append a row, int64."""
        self._numbers.frombytes(numbers.tobytes())
        self._lengths.append(len(numbers))

    def column(self) -> pa.Array:
        """Return all rows, as a view."""
        return _lists(self._lengths, np.frombuffer(self._numbers, np.int64))


class _OpenShard:
    """A shard's pending documents: their tokens, and a few bytes per document."""

    def __init__(
        self, dtype: np.dtype, *, masked: bool, pairs: bool, paragraphs: bool, labels: bool, seconds: bool
    ) -> None:
        self._target = _OpenColumn(dtype)
        self.source: _OpenColumn | None = None
        if pairs:
            self.source = _OpenColumn(dtype)
        self.num_targets = self.largest_id = 0
        self._lists = {name: _OpenLists() for name, kept in ((TARGET_RUNS, masked), (PARAGRAPHS, paragraphs)) if kept}
        """Columns with number lists, by name."""
        self._labels: array | None = None
        if labels:
            self._labels = array("i")
        self._seconds: array | None = None
        if seconds:
            self._seconds = array("q")
        self._sources = array("h")
        self._hashes = array("Q")
        self._names: list[str] = []

    def __len__(self) -> int:
        return len(self._names)

    @property
    def tokens(self) -> int:
        """Tokens in the documents; for pairs, in their targets."""
        return self._target.tokens

    def add(self, document: EncodedDocument) -> None:
        """Append a document."""
        self._target.add(document.tokens)
        # Recorded in the manifest, so that a model with fewer ids than the tokenizer is checked without reading tokens
        # (``open_for_model``).
        self.largest_id = max(self.largest_id, int(document.tokens.max()))
        for name, numbers in ((TARGET_RUNS, document.target_runs), (PARAGRAPHS, document.paragraphs)):
            assert (numbers is not None) == (name in self._lists), (
                "a folder cannot mix documents with and without a mask"
            )
            if numbers is not None:
                self._lists[name].add(numbers)
        self.num_targets += document.num_targets
        assert (document.source_tokens is not None) == (self.source is not None), (
            "a folder cannot mix pairs with other documents"
        )
        if self.source is not None and document.source_tokens is not None:
            self.source.add(document.source_tokens)
            self.largest_id = max(self.largest_id, int(document.source_tokens.max()))
        assert (document.label is not None) == (self._labels is not None), "a folder cannot mix images and texts"
        if self._labels is not None and document.label is not None:
            self._labels.append(document.label)
        assert (document.second is not None) == (self._seconds is not None), "a folder cannot mix preferences and texts"
        if self._seconds is not None and document.second is not None:
            assert 0 < document.second < len(document.tokens), "both replies have tokens"
            self._seconds.append(document.second)
        self._sources.append(document.source)
        self._hashes.append(document.hash)
        self._names.append(document.name)

    def record_batch(self) -> pa.RecordBatch:
        """Return the documents as one Arrow record batch, a view into this object: use it before the next ``add``."""
        # One batch per shard: a reader maps each column as one contiguous buffer.
        columns = {
            "tokens": self._target.column(),
            "source": pa.array(np.frombuffer(self._sources, np.int16)),
            "hash": pa.array(np.frombuffer(self._hashes, np.uint64)),
            "name": pa.array(self._names, pa.string()),
        }
        columns |= {name: lists.column() for name, lists in self._lists.items()}
        if self.source is not None:
            columns[SOURCE] = self.source.column()
        if self._labels is not None:
            columns[LABEL] = pa.array(np.frombuffer(self._labels, np.int32))
        if self._seconds is not None:
            columns[SECOND] = pa.array(np.frombuffer(self._seconds, np.int64))
        return pa.record_batch(columns)

    def clear(self) -> None:
        """Start the next shard in the same memory."""
        for column in (self._target, self.source):
            if column is not None:
                column.clear()
        self.num_targets = self.largest_id = 0
        self._lists = {name: _OpenLists() for name in self._lists}
        if self._labels is not None:
            self._labels = array("i")
        if self._seconds is not None:
            self._seconds = array("q")
        self._sources, self._hashes, self._names = array("h"), array("Q"), []


def _lists(lengths: array, values: np.ndarray) -> pa.Array:
    """Split values into one list per length."""
    # 64-bit offsets: a shard may hold more than 2^31 values.
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(np.frombuffer(lengths, np.int64), out=offsets[1:])
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))

"""Write documents into Arrow files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from data_pipeline.shards.manifest import Manifest, ShardEntry, length_histogram
from data_pipeline.shards.sums import sum_blocks, sums_file
from longctx.errors import DataError
from longctx.files import write_synced
from longctx.tokenizer.contract import Tokenizer

DEFAULT_SHARD_TOKENS = 1 << 26
"""Tokens after which a shard is closed: 128 MiB at two bytes a token. A document is never cut."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id below ``vocab_size``."""
    if vocab_size <= 1 << 16:
        return np.dtype(np.uint16)
    return np.dtype(np.uint32)


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

    The folder must exist and be empty. It is a shard folder only once ``finish`` has returned; therefore write into a
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
        """Append a document; close the shard before it would grow beyond ``shard_tokens``."""
        tokens = document.tokens
        if not len(tokens):
            raise DataError(f"{document.name} has no tokens. Leave empty documents out.")
        # Stored unsigned and small: an id outside of the range would come back as another one.
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
        inexact_documents: int = 0,
        left_out: str = "",
    ) -> Manifest:
        """Write the last shard and the manifest, and return the manifest."""
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
            inexact_documents=inexact_documents,
            left_out=left_out,
        )
        manifest.save(self._folder)
        return manifest

    def _close_shard(self) -> None:
        """Write the open documents as the next file, and the sums of its blocks beside it."""
        path = self._folder / f"{len(self._entries):05d}.arrow"
        batch = _record_batch(self._open, token_dtype(self._vocab_size))
        with path.open("wb") as file:
            with pa.ipc.new_file(file, batch.schema) as writer:
                writer.write_batch(batch)
            # On the disk before the manifest that vouches for it.
            file.flush()
            os.fsync(file.fileno())
        whole, sums = sum_blocks(path)
        write_synced(path.with_name(sums_file(path.name)), sums.tobytes())
        entry = ShardEntry(
            file=path.name,
            bytes=path.stat().st_size,
            xxh3_128=whole,
            documents=len(self._open),
            tokens=self._open_tokens,
            sums=xxhash.xxh3_128_hexdigest(sums.tobytes()),
        )
        self._entries.append(entry)
        self._open = []
        self._open_tokens = 0


def _record_batch(documents: list[EncodedDocument], dtype: np.dtype) -> pa.RecordBatch:
    """The documents as one Arrow record batch."""
    offsets = np.zeros(len(documents) + 1, dtype=np.int64)
    np.cumsum([len(document.tokens) for document in documents], out=offsets[1:])
    values = np.concatenate([document.tokens.astype(dtype, copy=False) for document in documents])
    return pa.record_batch(
        {
            "tokens": pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values)),
            "source": pa.array([document.source for document in documents], pa.int16()),
            "hash": pa.array([document.hash for document in documents], pa.uint64()),
            "name": pa.array([document.name for document in documents], pa.string()),
        }
    )

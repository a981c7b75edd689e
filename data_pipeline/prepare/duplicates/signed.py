"""Files per source part for comparing texts across a corpus: hashes, signatures and names.

``documents.bin`` has a 32-byte row per document. For near duplicates, ``signatures.bin`` has the signature values and
``bands.bin`` the band keys, band after band, so that one band is read without the others. ``names.bin`` has the names
and ``ends.bin`` each name's end. The record is written last and validates all files.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from data_pipeline.prepare.completion_record import are_whole, load_record, save_record, sync_files
from data_pipeline.prepare.duplicates.duplicate_rule import DuplicateRule
from data_pipeline.prepare.duplicates.signatures import Signer, band_keys
from longctx.files import sync_path

FORMAT = "longctx-signed-1"
RECORD_FILE = "signed.json"
DOCUMENT_DTYPE = np.dtype([("low", "<u8"), ("high", "<u8"), ("hash", "<u8"), ("text_bytes", "<u8")])
"""xxh3_128 of the text in two halves, its xxh3_64 (as in shards, decides the split), and its bytes."""
_DOCUMENTS, _SIGNATURES, _KEYS, _BANDS = "documents.bin", "signatures.bin", "keys.tmp", "bands.bin"
_NAMES, _ENDS = "names.bin", "ends.bin"


@dataclass(frozen=True, kw_only=True)
class SignedRecord:
    """Record for a source part with hashed texts."""

    documents: int
    text_bytes: int
    files: dict[str, str]
    """xxh3_128 checksum per file."""

    @classmethod
    def load(cls, folder: Path) -> SignedRecord | None:
        """Return a source part's record if all its files are intact."""
        body = load_record(folder / RECORD_FILE, FORMAT)
        if body is None or not are_whole(folder, body["files"]):
            return None
        return cls(**body)


class SignedWriter:
    """Writer for one source part's files. Memory is bounded by one group of texts, for any number of documents."""

    def __init__(self, folder: Path, rule: DuplicateRule) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder, self._rule = folder, rule
        self._files: dict[str, BinaryIO] = {}
        self._signer = None
        if rule.finds_near:
            self._signer = Signer(rule)
        self.documents = self.text_bytes = self._name_bytes = 0

    def add(self, name: str, text: str) -> None:
        """Add the next document."""
        raw = text.encode()
        whole, half = xxhash.xxh3_128_intdigest(raw), xxhash.xxh3_64_intdigest(raw)
        row = np.array([(whole & 0xFFFFFFFFFFFFFFFF, whole >> 64, half, len(raw))], dtype=DOCUMENT_DTYPE)
        self._write(_DOCUMENTS, row.tobytes())
        encoded_name = name.encode()
        self._name_bytes += len(encoded_name)
        self._write(_NAMES, encoded_name)
        self._write(_ENDS, self._name_bytes.to_bytes(8, "little"))
        self.documents += 1
        self.text_bytes += len(raw)
        if self._signer is not None:
            self._write_signatures(self._signer.add(text, half))

    def finish(self) -> SignedRecord:
        """Write the remaining signatures, sync all files to disk, and then write the record."""
        if self._signer is not None:
            self._write_signatures(self._signer.finish())
        self._close()
        if self._signer is not None and self.documents:
            self._write_bands()
        self._close()
        (self._folder / _KEYS).unlink(missing_ok=True)
        # The record validates every file, so all must be on disk first.
        record = SignedRecord(documents=self.documents, text_bytes=self.text_bytes, files=sync_files(self._folder))
        save_record(self._folder / RECORD_FILE, FORMAT, dataclasses.asdict(record))
        sync_path(self._folder)
        return record

    def _write_signatures(self, signatures: Iterator[np.ndarray]) -> None:
        """Write signatures and their band keys, text by text."""
        for some in signatures:
            self._write(_SIGNATURES, some.tobytes())
            # Keys arrive text by text and are transposed once all are written.
            self._write(_KEYS, band_keys(some, *self._rule.bands()).tobytes())

    def _write_bands(self) -> None:
        """Rewrite the keys band by band."""
        bands, _ = self._rule.bands()
        # Map the file: a source part may have millions of small documents.
        keys = np.memmap(self._folder / _KEYS, dtype=np.uint64, mode="r").reshape(-1, bands)
        for band in range(bands):
            self._write(_BANDS, keys[:, band].tobytes())

    def _write(self, name: str, content: bytes) -> None:
        if name not in self._files:
            self._files[name] = (self._folder / name).open("wb")
        self._files[name].write(content)

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}


class PartNames:
    """Memory-mapped document names in a source part."""

    def __init__(self, names: np.ndarray, ends: np.ndarray) -> None:
        self._names, self._ends = names, ends

    def __getitem__(self, document: int) -> str:
        start = 0
        if document:
            start = int(self._ends[document - 1])
        return self._names[start : int(self._ends[document])].tobytes().decode()


class SignedPart:
    """Files of one source part. Each is mapped on access, and closed when its array is no longer used.

    A corpus has thousands of parts: keeping them open would exceed the limit on open files.
    """

    def __init__(self, folder: Path, documents: int, rule: DuplicateRule) -> None:
        self.documents = documents
        self._folder, self._rule = folder, rule

    @property
    def document_rows(self) -> np.ndarray:
        """Rows of ``DOCUMENT_DTYPE``, one per document."""
        return self._map(_DOCUMENTS, DOCUMENT_DTYPE)

    @property
    def signatures(self) -> np.ndarray:
        """Signatures, uint16 [documents, permutations]."""
        return self._map(_SIGNATURES, np.dtype("<u2")).reshape(self.documents, self._rule.permutations)

    @property
    def bands(self) -> np.ndarray:
        """Band keys, uint64 [bands, documents]."""
        return self._map(_BANDS, np.dtype("<u8")).reshape(self._rule.bands()[0], self.documents)

    def names(self) -> PartNames:
        """Return the document names."""
        return PartNames(self._map(_NAMES, np.dtype(np.uint8)), self._map(_ENDS, np.dtype("<u8")))

    def _map(self, name: str, dtype: np.dtype) -> np.ndarray:
        # An empty file cannot be mapped.
        if not self.documents:
            return np.empty(0, dtype=dtype)
        return np.memmap(self._folder / name, dtype=dtype, mode="r")


SLICE_DOCUMENTS = 1 << 22
"""Approximate number of documents whose keys are sorted at once; a larger corpus is divided by its keys' first bits."""

_MAPPED_NAMES = 64
"""Source parts whose names are mapped at once, with two open files each."""


class SignedCorpus:
    """All hashed parts of a source."""

    def __init__(self, parts: Sequence[SignedPart]) -> None:
        self.parts = parts
        self.starts = np.cumsum([0] + [part.documents for part in parts])
        """Each part's first document number, followed by the total."""
        # Removed documents come in order, but their kept counterparts may be in any part.
        self._names = lru_cache(maxsize=_MAPPED_NAMES)(lambda number: parts[number].names())

    def __len__(self) -> int:
        return int(self.starts[-1])

    def runs(self, column: Callable[[SignedPart], np.ndarray], leave: np.ndarray) -> Iterator[np.ndarray]:
        """Yield documents that share a key, int64 [2, n]: document numbers and bucket numbers.

        A bucket holds the documents with one key; buckets follow one another, with documents in order. ``column``
        returns a part's keys, uint64. Documents in the mask ``leave`` are skipped.
        """
        # External sort by key range: a slice holds all documents with keys in one interval, so equal keys meet in one
        # slice and memory stays bounded for any corpus size.
        slices = max(1, -(-len(self) // SLICE_DOCUMENTS))
        for number in range(slices):
            keys, documents = self._slice(column, leave, number, slices)
            order = np.argsort(keys, kind="stable")
            keys, documents = keys[order], documents[order]
            is_first = np.ones(len(keys), dtype=bool)
            is_first[1:] = keys[1:] != keys[:-1]
            # A document is alone if it starts its bucket and the next document starts another.
            is_alone = is_first & np.append(is_first[1:], True)
            numbers = np.cumsum(is_first)[~is_alone]
            yield np.stack([documents[~is_alone], numbers])

    def gather(self, documents: np.ndarray, rows: Callable[[SignedPart], np.ndarray]) -> np.ndarray:
        """Return the rows for documents in any order."""
        parts = np.searchsorted(self.starts, documents, side="right") - 1
        first = rows(self.parts[0])
        found = np.empty((len(documents), *first.shape[1:]), dtype=first.dtype)
        # Go part by part, so that a file is mapped once for all requested rows.
        for part in np.unique(parts):
            selected = np.flatnonzero(parts == part)
            found[selected] = rows(self.parts[part])[documents[selected] - self.starts[part]]
        return found

    def signatures(self, documents: np.ndarray) -> np.ndarray:
        """Return signatures, uint16 [n, permutations]."""
        return self.gather(documents, lambda part: part.signatures)

    def document_rows(self, documents: np.ndarray) -> np.ndarray:
        """Return rows of ``DOCUMENT_DTYPE`` [n]."""
        return self.gather(documents, lambda part: part.document_rows)

    def name(self, document: int) -> str:
        """Return a document's name."""
        part = int(np.searchsorted(self.starts, document, side="right")) - 1
        return self._names(part)[document - int(self.starts[part])]

    def _slice(
        self, column: Callable[[SignedPart], np.ndarray], leave: np.ndarray, number: int, slices: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and numbers of documents with a key in one slice of the key range."""
        keys, documents = [np.empty(0, dtype=np.uint64)], [np.empty(0, dtype=np.int64)]
        for part, start in zip(self.parts, self.starts.tolist(), strict=False):
            found = column(part)
            wanted = ~leave[start : start + part.documents]
            if slices > 1:
                wanted &= (found >> np.uint64(32)) * np.uint64(slices) >> np.uint64(32) == number
            selected = np.flatnonzero(wanted)
            keys.append(found[selected])
            documents.append(selected + start)
        return np.concatenate(keys), np.concatenate(documents)

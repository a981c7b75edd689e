"""Read shards: tokenized documents in Arrow files, memory-mapped, checksummed and readable by plain pyarrow.

Each ``NNNNN.arrow`` is an Arrow IPC file with one record batch, a row a document: ``tokens`` (large_list of uint16 or
uint32, by vocabulary), ``source`` (int16), ``hash`` (uint64, xxh3_64 of the text), ``name`` (string).
"""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import mmap
import threading
from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from data_pipeline.shards.manifest import MANIFEST_FILE, Manifest, ShardEntry
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer, load_tokenizer

MAX_MAPPED = 4096
"""Shards of a folder that are mapped at once. Linux gives a process 65,530 mappings unless it is told otherwise
(``vm.max_map_count``), and libraries take some thousands."""

_LIBC = ctypes.CDLL(None)


class ShardSet:
    """A shard folder opened for reading: all documents by number, as views into memory-mapped files.

    Opening reads the manifest alone; nothing is kept for each document. A file is mapped when something of it is
    asked for, at most ``max_mapped`` at once; the one that was used longest ago is unmapped for another. A view keeps
    its own file mapped as long as it lives. Threads may share a set.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, verify: bool, max_mapped: int = MAX_MAPPED) -> None:
        self.folder = folder
        self.manifest = manifest
        self._max_mapped = max_mapped
        self._mapped: OrderedDict[int, _Shard] = OrderedDict()
        self._lock = threading.Lock()
        for number, entry in enumerate(manifest.shards):
            # Cheap, and enough for a copy that was cut short: also where checksums are not read.
            _check_size(folder, entry)
            if verify:
                self._keep(number, _open_shard(folder, entry, verify=True))
        self._first_document = list(accumulate((entry.documents for entry in manifest.shards), initial=0))

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = True, max_mapped: int = MAX_MAPPED) -> ShardSet:
        """Open a folder; ``DataError`` names the file that is missing, truncated or damaged.

        Sizes of files are checked here, counts and offsets as they are used; ``verify`` reads every byte to check the
        checksums, and all offsets.
        """
        folder = Path(folder)
        return cls(folder, Manifest.load(folder), verify=verify, max_mapped=max_mapped)

    @classmethod
    def open_one(cls, folder: Path, manifest: Manifest, entry: ShardEntry) -> ShardSet:
        """Open one shard of the folder, its checksum verified: damage can be looked for file by file."""
        return cls(folder, dataclasses.replace(manifest, shards=[entry]), verify=True)

    @property
    def num_documents(self) -> int:
        """Documents in all shards."""
        return self._first_document[-1]

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards, document begins and ends included."""
        return sum(entry.tokens for entry in self.manifest.shards)

    def lengths_of(self, documents: np.ndarray) -> np.ndarray:
        """Tokens of each of these documents [n], int64. Fastest where they ascend: then each shard is looked at once.

        DataError for offsets that cannot be right.
        """
        lengths = np.empty(len(documents), np.int64)
        shards = np.searchsorted(self._first_document, documents, side="right") - 1
        # Runs of documents of one shard.
        bounds = np.flatnonzero(np.diff(shards)) + 1
        for part in np.split(np.arange(len(documents)), bounds):
            if len(part):
                number = int(shards[part[0]])
                rows = documents[part] - self._first_document[number]
                lengths[part] = self._shard(number).lengths_of(rows, self._path(number))
        return lengths

    def longest_document(self) -> int:
        """Tokens of the longest document; 0 without one. Reads the offsets of all shards, 8 bytes a document."""
        longest = 0
        for number in range(len(self.manifest.shards)):
            longest = max(longest, self._shard(number).longest_document())
        return longest

    def document(self, index: int) -> np.ndarray:
        """All tokens of document ``index``, a read-only view (uint16 or uint32); DataError for wrong offsets."""
        number, row = self._find(index)
        return self._shard(number).document(row, self._path(number))

    def slice(self, index: int, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop`` of document ``index``, a read-only view; only those pages are touched."""
        return self.document(index)[start:stop]

    def name(self, index: int) -> str:
        """The name of document ``index`` in its source."""
        number, row = self._find(index)
        return self._shard(number).batch.column("name")[row].as_py()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the folder; ``DataError`` if the file beside the shards is another one."""
        tokenizer = load_tokenizer(self.folder)
        if tokenizer.fingerprint != self.manifest.tokenizer:
            raise DataError(
                f"{tokenizer.path} is not the tokenizer that made these shards "
                f"(fingerprint {tokenizer.fingerprint}, wanted {self.manifest.tokenizer}). Put the original back."
            )
        return tokenizer

    def shard_tokens(self, number: int) -> np.ndarray:
        """All tokens of one shard, one document after the other, as a read-only view."""
        return self._shard(number).values

    def _find(self, index: int) -> tuple[int, int]:
        """The number of the shard of document ``index``, and the document's number there."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        number = bisect.bisect_right(self._first_document, index) - 1
        return number, index - self._first_document[number]

    def _path(self, number: int) -> Path:
        return self.folder / self.manifest.shards[number].file

    def _shard(self, number: int) -> _Shard:
        """One shard, mapped again where it no longer is; DataError where it is no longer as the manifest says."""
        with self._lock:
            shard = self._mapped.get(number)
            if shard is None:
                shard = _open_shard(self.folder, self.manifest.shards[number], verify=False)
            self._keep(number, shard)
        return shard

    def _keep(self, number: int, shard: _Shard) -> None:
        """Put a shard last among the mapped ones, and let go of the first where there are too many."""
        self._mapped[number] = shard
        self._mapped.move_to_end(number)
        if len(self._mapped) > self._max_mapped:
            self._mapped.popitem(last=False)


@dataclass(frozen=True)
class _Shard:
    """One memory-mapped file: document ``i`` is ``values[offsets[i] : offsets[i + 1]]``."""

    batch: pa.RecordBatch
    offsets: np.ndarray
    values: np.ndarray

    def document(self, row: int, path: Path) -> np.ndarray:
        """All tokens of a document, as a view."""
        start, stop = self.offsets[row], self.offsets[row + 1]
        # A slice of wrong offsets would be another document's tokens, or fewer than the plan counts on.
        if not 0 <= start < stop <= len(self.values):
            raise _wrong_offsets(path)
        return self.values[start:stop]

    def lengths_of(self, rows: np.ndarray, path: Path) -> np.ndarray:
        """Tokens of each of these documents."""
        if len(rows) * mmap.PAGESIZE >= self.offsets.nbytes:
            # Some of every page, or nearly: one read of all is faster than one of each page.
            _advise(self._offsets_buffer, mmap.MADV_WILLNEED)
        starts, stops = self.offsets[rows], self.offsets[rows + 1]
        if starts.min() < 0 or (stops <= starts).any() or stops.max() > len(self.values):
            raise _wrong_offsets(path)
        self._release_offsets()
        return stops - starts

    def longest_document(self) -> int:
        """Tokens of the longest document."""
        # All offsets, in one read.
        _advise(self._offsets_buffer, mmap.MADV_WILLNEED)
        longest = int(np.diff(self.offsets).max(initial=0))
        self._release_offsets()
        return longest

    def _release_offsets(self) -> None:
        """Take the pages of offsets out of this process; they stay in the system's cache.

        A block has a few documents of every shard: a process would come to have the offsets of the whole corpus.
        """
        # Of a file that is mapped for reading: nothing can be lost.
        _advise(self._offsets_buffer, mmap.MADV_DONTNEED)

    @property
    def _offsets_buffer(self) -> pa.Buffer:
        return self.batch.column("tokens").offsets.buffers()[1]


_ADVICE = "Copy the shard again or build the folder again."


def _check_size(folder: Path, entry: ShardEntry) -> None:
    """DataError unless a file is as large as the manifest says."""
    path = folder / entry.file
    try:
        size = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    if size != entry.bytes:
        raise DataError(f"{path} has {size} bytes where {MANIFEST_FILE} says {entry.bytes}. {_ADVICE}")


def _open_shard(folder: Path, entry: ShardEntry, *, verify: bool) -> _Shard:
    """Map one file into memory; ``DataError`` if it is not the one that the manifest lists."""
    path = folder / entry.file
    # It may have changed since the folder was opened.
    _check_size(folder, entry)
    try:
        content = _map(path, entry.bytes)
        if verify and xxhash.xxh3_128_hexdigest(content) != entry.xxh3_128:
            raise DataError(f"{path} is damaged: its checksum is not the one in {MANIFEST_FILE}. {_ADVICE}")
        shard = _views(content, entry, path)
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    # Documents are looked at one by one as they are used: a file has up to millions.
    if verify and not (np.diff(shard.offsets) > 0).all():
        raise _wrong_offsets(path)
    return shard


def _map(path: Path, size: int) -> pa.Buffer:
    """A file of so many bytes, mapped into memory until the last view of it is gone."""
    # Closed at once: shards may be more than the files that a process may have open. The mapping stays.
    with pa.memory_map(str(path)) as file:
        first = file.read_buffer(1)
    # To read the file through Arrow is to have the system read ahead whole record batches: all of every shard.
    return pa.foreign_buffer(first.address, size, first)


def _advise(part: pa.Buffer, advice: int) -> None:
    """Tell the system how a part of a mapped file will be read (madvise)."""
    begin = part.address // mmap.PAGESIZE * mmap.PAGESIZE
    _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(part.address + part.size - begin), advice)


def _views(content: pa.Buffer, entry: ShardEntry, path: Path) -> _Shard:
    """Numpy views of offsets and tokens, without copying, after a check that they can be right."""
    # Tokens are read in runs; of everything else a few bytes here and there, and what lies around them is not needed.
    _advise(content, mmap.MADV_RANDOM)
    batch = pa.ipc.open_file(content).get_batch(0)
    tokens = batch.column("tokens")
    offsets = tokens.offsets.to_numpy(zero_copy_only=True)
    values = tokens.values.to_numpy(zero_copy_only=True)
    counted = (len(offsets) - 1, len(values)) == (entry.documents, entry.tokens)
    if not counted or offsets[0] != 0 or offsets[-1] != len(values):
        raise DataError(
            f"{path} does not hold the {entry.documents} documents and {entry.tokens} tokens "
            f"that {MANIFEST_FILE} lists. Build the folder again."
        )
    for part in (tokens.offsets.buffers()[1], tokens.values.buffers()[1]):
        # Else it is in memory of its own, which advice for files would destroy.
        if not content.address <= part.address <= content.address + content.size - part.size:
            raise DataError(f"{path} is compressed: its tokens cannot be mapped. Build the folder again.")
    _advise(tokens.values.buffers()[1], mmap.MADV_NORMAL)
    return _Shard(batch, offsets, values)


def _unreadable(path: Path, error: Exception) -> DataError:
    """The error for a file that is not there, or that is no shard."""
    if isinstance(error, FileNotFoundError):
        return DataError(f"{path} is missing, though {MANIFEST_FILE} lists it. {_ADVICE}")
    return DataError(f"{path} cannot be read as an Arrow shard ({error}). {_ADVICE}")


def _wrong_offsets(path: Path) -> DataError:
    """The error for documents that begin or end where they cannot."""
    return DataError(f"{path} is damaged: its documents do not follow each other. {_ADVICE}")

"""Read shards: tokenized documents in Arrow files, memory-mapped, checksummed and readable by plain pyarrow.

Each ``NNNNN.arrow`` is an Arrow IPC file with one record batch, a row a document: ``tokens`` (large_list of uint16 or
uint32, by vocabulary), ``source`` (int16), ``hash`` (uint64, xxh3_64 of the text), ``name`` (string).
"""

from __future__ import annotations

import bisect
import dataclasses
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


class ShardSet:
    """A shard folder opened for reading: all documents by number, as views into memory-mapped files.

    At most ``max_mapped`` files are mapped; the one that was used longest ago is unmapped for another. A view keeps its
    own file mapped as long as it lives. Threads may share a set.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, verify: bool, max_mapped: int = MAX_MAPPED) -> None:
        self.folder = folder
        self.manifest = manifest
        self._max_mapped = max_mapped
        self._mapped: OrderedDict[int, _Shard] = OrderedDict()
        self._lock = threading.Lock()
        lengths: list[np.ndarray] = []
        for number, entry in enumerate(manifest.shards):
            shard = _open_shard(folder, entry, verify=verify)
            lengths.append(np.diff(shard.offsets))
            self._keep(number, shard)
        self.lengths: np.ndarray = np.empty(0, np.int64)
        """Tokens of each document, int64."""
        if lengths:
            self.lengths = np.concatenate(lengths)
        self._first_document = list(accumulate((len(part) for part in lengths), initial=0))

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = True, max_mapped: int = MAX_MAPPED) -> ShardSet:
        """Open a folder; ``DataError`` names the file that is missing, truncated or damaged.

        Sizes, offsets and counts are always checked; ``verify`` also reads every byte to check the checksums.
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
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards, document begins and ends included."""
        return int(self.lengths.sum())

    def document(self, index: int) -> np.ndarray:
        """All tokens of document ``index``, a read-only view (uint16 or uint32)."""
        shard, row = self._find(index)
        return shard.values[shard.offsets[row] : shard.offsets[row + 1]]

    def slice(self, index: int, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop`` of document ``index``, a read-only view; only those pages are touched."""
        return self.document(index)[start:stop]

    def name(self, index: int) -> str:
        """The name of document ``index`` in its source."""
        shard, row = self._find(index)
        return shard.batch.column("name")[row].as_py()

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

    def _find(self, index: int) -> tuple[_Shard, int]:
        """The shard of document ``index``, and its number there."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        number = bisect.bisect_right(self._first_document, index) - 1
        return self._shard(number), index - self._first_document[number]

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


def _open_shard(folder: Path, entry: ShardEntry, *, verify: bool) -> _Shard:
    """Map one file into memory; ``DataError`` if it is not the one that the manifest lists."""
    path = folder / entry.file
    advice = "Copy the shard again or build the folder again."
    try:
        # Cheap, and enough for a copy that was cut short: also where checksums are not read.
        if path.stat().st_size != entry.bytes:
            raise DataError(
                f"{path} has {path.stat().st_size} bytes where {MANIFEST_FILE} says {entry.bytes}. {advice}"
            )
        mapped = pa.memory_map(str(path))
        if verify and xxhash.xxh3_128_hexdigest(mapped.read_buffer()) != entry.xxh3_128:
            raise DataError(f"{path} is damaged: its checksum is not the one in {MANIFEST_FILE}. {advice}")
        # read_buffer has moved to the end.
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
    # Wrong offsets would read beyond the mapped file, or another document's tokens.
    ascending = bool((np.diff(offsets) > 0).all()) and offsets[0] == 0 and offsets[-1] == len(values)
    if not ascending or len(offsets) - 1 != entry.documents or len(values) != entry.tokens:
        raise DataError(
            f"{path} does not hold the {entry.documents} documents and {entry.tokens} tokens "
            f"that {MANIFEST_FILE} lists. Build the folder again."
        )
    return _Shard(batch, offsets, values)

"""One shard, mapped into memory: documents, lengths and names as views, each checked by its blocks before it is used.

Each ``NNNNN.arrow`` is an Arrow IPC file with one record batch, a row a document: ``tokens`` (large_list of uint16 or
uint32, by vocabulary), ``source`` (int16), ``hash`` (uint64, xxh3_64 of the text), ``name`` (string); in folders of
conversations ``counted`` too (large_list of int64): runs of tokens whose prediction counts, as pairs of bounds.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_pipeline.shards.manifest import MANIFEST_FILE, ShardEntry
from data_pipeline.shards.stamps import FileState, cheapest_state, file_state, opened_state
from data_pipeline.shards.sums import ADVICE, BLOCK_SHIFT, Blocks, advise, read_sums
from longctx.errors import DataError
from longctx.files import check_link
from longctx.untrusted import git_lfs
from longctx.untrusted.reading import NotFetchedError, check_fetched

_OFFSET, _NAME_OFFSET = 8, 4
"""Bytes of an offset: of a document in the tokens, and of a name in the names."""
_MAGIC, _CONTINUES = b"ARROW1", -1


class MappedShard:
    """One memory-mapped file: document ``i`` is ``values[offsets[i] : offsets[i + 1]]``. ``open`` makes it."""

    def __init__(self, path: Path, state: FileState, blocks: Blocks, content: pa.Buffer, batch: pa.RecordBatch) -> None:
        """DataError where the columns do not lie in the file as they must."""
        self.path, self.state, self.state_now = path, state, cheapest_state(path)
        self._blocks = blocks
        _check_columns(batch, path)
        tokens, names = batch.column("tokens"), batch.column("name")
        self._batch = batch
        self.offsets = tokens.offsets.to_numpy(zero_copy_only=True)
        self.values = tokens.values.to_numpy(zero_copy_only=True)
        self._offsets_buffer, values = tokens.offsets.buffers()[1], tokens.values.buffers()[1]
        self._name_offsets = np.frombuffer(names.buffers()[1], np.int32)
        self._names = memoryview(names.buffers()[2] or b"")
        parts = (self._offsets_buffer, values, names.buffers()[1], names.buffers()[2])
        self._offsets_at, self._values_at, self._name_offsets_at, self._names_at = (
            _place(part, content, path) for part in parts
        )
        # Plain integers come from a memory view, in a third of the time that numpy takes.
        self.tokens = _reader(path, blocks, self.values, memoryview(self.offsets), self._offsets_at, self._values_at)
        """Reads tokens ``start`` to ``stop`` of a document (to its end if None), as a view."""
        self._counted: _Lists | None = None
        if "counted" in batch.schema.names:
            self._counted = _Lists(batch.column("counted"), content, blocks, path)
        # Tokens are read in runs; of everything else a few bytes here and there.
        advise(values, mmap.MADV_NORMAL)

    @classmethod
    def open(cls, folder: Path, entry: ShardEntry, *, verify: bool) -> MappedShard:
        """Map one file; DataError if it is not the one that the manifest lists.

        With ``verify``, what is read of it is checked by its sums, the parts that Arrow reads before it does.
        """
        path = folder / entry.file
        # It may have changed since the folder was opened. Asked before it is mapped: a file that takes its place in
        # between is found the next time that this is asked.
        state = check_size(folder, entry, opened_state)
        sums = None
        if verify and entry.sums:
            sums = read_sums(folder, entry)
        try:
            content = _map(path, entry.bytes)
            advise(content, mmap.MADV_RANDOM)
            blocks = Blocks(content, sums, path)
            if sums is not None:
                _check_metadata(memoryview(content), blocks)
            shard = cls(path, state, blocks, content, pa.ipc.open_file(content).get_batch(0))
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            raise unreadable(path, error) from error
        shard._check_counts(entry)
        return shard

    @property
    def num_documents(self) -> int:
        """Documents in this file."""
        return len(self.offsets) - 1

    def all_tokens(self) -> np.ndarray:
        """The tokens of all documents, as a view."""
        self._blocks.check(self._values_at, self._values_at + self.values.nbytes)
        return self.values

    def lengths_of(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of each of these documents."""
        if len(rows) * mmap.PAGESIZE >= self.offsets.nbytes:
            # Some of every page, or nearly: one read of all is faster than one of each page.
            advise(self._offsets_buffer, mmap.MADV_WILLNEED)
        self._blocks.check_items(self._offsets_at + _OFFSET * rows, 2 * _OFFSET)
        starts, stops = self.offsets[rows], self.offsets[rows + 1]
        if starts.min() < 0 or (stops <= starts).any() or stops.max() > len(self.values):
            raise _wrong_offsets(self.path)
        self._release_offsets()
        return stops - starts

    def longest_document(self) -> int:
        """Tokens of the longest document."""
        # All offsets, in one read.
        advise(self._offsets_buffer, mmap.MADV_WILLNEED)
        self._blocks.check(self._offsets_at, self._offsets_at + self.offsets.nbytes)
        longest = int(np.diff(self.offsets).max(initial=0))
        self._release_offsets()
        return longest

    def name(self, row: int) -> str:
        """The name of a document in its source."""
        at = self._name_offsets_at + _NAME_OFFSET * row
        self._blocks.check(at, at + 2 * _NAME_OFFSET)
        start, stop = int(self._name_offsets[row]), int(self._name_offsets[row + 1])
        if not 0 <= start <= stop <= len(self._names):
            raise _wrong_offsets(self.path)
        self._blocks.check(self._names_at + start, self._names_at + stop)
        try:
            return bytes(self._names[start:stop]).decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path} is damaged: a name is no text ({error.reason}). {ADVICE}") from error

    def counted(self, row: int) -> np.ndarray | None:
        """Return the runs of a document's tokens that count, as ``EncodedDocument.counted`` has them; None for all."""
        if self._counted is None:
            return None
        bounds = self._counted.of(row)
        length = int(self.offsets[row + 1] - self.offsets[row])
        if len(bounds) % 2 or (np.diff(bounds, prepend=-1) <= 0).any() or (len(bounds) and bounds[-1] > length):
            raise DataError(f"{self.path} is damaged: its counted tokens are no runs of its documents. {ADVICE}")
        return bounds

    def strange_sources(self, sources: int) -> int | None:
        """A number in the column ``source`` which is not below ``sources``; None without one, or without sources."""
        column = self._batch.column("source").to_numpy(zero_copy_only=False)
        strange = column[(column < 0) | (column >= sources)]
        if not sources or not len(strange):
            return None
        return int(strange[0])

    def _check_counts(self, entry: ShardEntry) -> None:
        """DataError unless there are as many documents and tokens as the manifest says."""
        counted = (self.num_documents, len(self.values)) == (entry.documents, entry.tokens)
        if counted:
            ends = np.array([0, self.num_documents])
            self._blocks.check_items(self._offsets_at + _OFFSET * ends, _OFFSET)
            counted = self.offsets[ends].tolist() == [0, len(self.values)]
        if bool(entry.counted) > (self._counted is not None):
            raise DataError(f"{self.path} says of no token that it counts, and {MANIFEST_FILE} of some. {ADVICE}")
        if not counted:
            raise DataError(
                f"{self.path} does not hold the {entry.documents} documents and {entry.tokens} tokens "
                f"that {MANIFEST_FILE} lists. Build the folder again."
            )

    def _release_offsets(self) -> None:
        """Take the pages of offsets out of this process; they stay in the system's cache.

        A block has a few documents of every shard: a process would come to have the offsets of the whole corpus.
        """
        # Of a file that is mapped for reading: nothing can be lost.
        advise(self._offsets_buffer, mmap.MADV_DONTNEED)


class _Lists:
    """A column of lists of int64."""

    def __init__(self, column: pa.Array, content: pa.Buffer, blocks: Blocks, path: Path) -> None:
        self._blocks, self._path = blocks, path
        self._offsets = column.offsets.to_numpy(zero_copy_only=True)
        self._values = column.values.to_numpy(zero_copy_only=True)
        buffers = (column.offsets.buffers()[1], column.values.buffers()[1])
        self._offsets_at, self._values_at = (_place(part, content, path) for part in buffers)

    def of(self, row: int) -> np.ndarray:
        """Return a row's list, a view."""
        at = self._offsets_at + _OFFSET * row
        self._blocks.check(at, at + 2 * _OFFSET)
        start, stop = int(self._offsets[row]), int(self._offsets[row + 1])
        if not 0 <= start <= stop <= len(self._values):
            raise _wrong_offsets(self._path)
        self._blocks.check(self._values_at + 8 * start, self._values_at + 8 * stop)
        return self._values[start:stop]


def _reader(
    path: Path, blocks: Blocks, values: np.ndarray, offset_of: memoryview, offsets_at: int, values_at: int
) -> Callable[..., np.ndarray]:
    """``MappedShard.tokens``, which has what it needs at hand: a method would look it up for a third of its time.

    It does not know the shard itself, which goes with its last user, and not when Python looks for circles.
    """
    token_bytes, num_tokens = values.itemsize, len(values)

    def tokens(row: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        if not blocks.all_seen:
            at = offsets_at + _OFFSET * row
            # ``check`` asks the same. Here it would take a quarter of the time of the whole read.
            if not (blocks.seen[at >> BLOCK_SHIFT] and blocks.seen[(at + 2 * _OFFSET - 1) >> BLOCK_SHIFT]):
                blocks.check(at, at + 2 * _OFFSET)
        first, last = offset_of[row], offset_of[row + 1]
        # A slice of wrong offsets would be another document's tokens, or fewer than the plan counts on.
        if not 0 <= first < last <= num_tokens:
            raise _wrong_offsets(path)
        if stop is not None and first + stop < last:
            last = first + stop
        first += start
        if first >= last:
            return values[:0]
        if not blocks.all_seen:
            begin, end = values_at + token_bytes * first, values_at + token_bytes * last
            if blocks.seen.find(0, begin >> BLOCK_SHIFT, ((end - 1) >> BLOCK_SHIFT) + 1) >= 0:
                blocks.check(begin, end)
        return values[first:last]

    return tokens


def _wrong_offsets(path: Path) -> DataError:
    """The error for documents that begin or end where they cannot."""
    return DataError(f"{path} is damaged: its documents do not follow each other. {ADVICE}")


def check_size(folder: Path, entry: ShardEntry, state_of: Callable[[Path], FileState] = file_state) -> FileState:
    """What the system says of a shard; DataError unless it is as large as the manifest says, and in its folder."""
    path = folder / entry.file
    try:
        if path.is_symlink():
            check_link(folder, entry.file)
        state = state_of(path)
    except OSError as error:
        raise unreadable(path, error) from error
    if state[0] != entry.bytes:
        if _is_pointer(path):
            raise DataError(f"{path} is a Git LFS pointer: {git_lfs.ADVICE}.")
        raise DataError(f"{path} has {state[0]} bytes where {MANIFEST_FILE} says {entry.bytes}. {ADVICE}")
    return state


def _is_pointer(path: Path) -> bool:
    """Return whether a few lines of Git LFS stand where the shard should be."""
    try:
        check_fetched(path)
    except NotFetchedError:
        return True
    except OSError:
        return False
    return False


def unreadable(path: Path, error: Exception) -> DataError:
    """The error for a file that is not there, or that is no shard."""
    if isinstance(error, FileNotFoundError):
        return DataError(f"{path} is missing, though {MANIFEST_FILE} lists it. {ADVICE}")
    return DataError(f"{path} cannot be read as an Arrow shard ({error}). {ADVICE}")


def _map(path: Path, size: int) -> pa.Buffer:
    """A file of so many bytes, mapped into memory until the last view of it is gone."""
    # Closed at once: shards may be more than the files that a process may have open. The mapping stays.
    with pa.memory_map(str(path)) as file:
        if file.size() != size:
            raise ValueError(f"it has {file.size()} bytes and had {size}")
        first = file.read_buffer(1)
    # To read the file through Arrow is to have the system read ahead whole record batches: all of every shard.
    return pa.foreign_buffer(first.address, size, first)


def _check_columns(batch: pa.RecordBatch, path: Path) -> None:
    """DataError, or an error of Arrow's, unless the columns are those of a shard and lie where they say."""
    tokens, names = batch.column("tokens"), batch.column("name")
    if tokens.type not in (pa.large_list(pa.uint16()), pa.large_list(pa.uint32())) or names.type != pa.string():
        raise DataError(f"{path} is no shard: its tokens are {tokens.type}, its names {names.type}. {ADVICE}")
    if batch.schema.field("source").type != pa.int16() or any(column.null_count for column in batch.columns):
        raise DataError(f"{path} is no shard: its sources are no int16, or a value is missing. {ADVICE}")
    if "counted" in batch.schema.names and batch.column("counted").type != pa.large_list(pa.int64()):
        raise DataError(f"{path} is no shard: its counted tokens are {batch.column('counted').type}. {ADVICE}")
    # Whether each buffer is as long as its column says: numpy would read on behind a shorter one.
    batch.validate()


def _check_metadata(content: memoryview, blocks: Blocks) -> None:
    """Check the blocks that Arrow reads when it opens a file: two messages at its beginning, and the footer.

    ValueError where these do not follow each other as the writer leaves them.
    """
    size = len(content)
    # The magic word and two bytes; then schema and record batch, each as −1, its length, and so many bytes.
    at = len(_MAGIC) + 2
    for message in ("schema", "record batch"):
        if at + 8 > size:
            raise ValueError(f"it ends before its {message}")
        blocks.check(0, at + 8)
        marker, length = struct.unpack_from("<ii", content, at)
        at += 8 + length
        if marker != _CONTINUES or length < 0 or at > size:
            raise ValueError(f"it has no {message} where one belongs")
        blocks.check(0, at)
    # The footer ends with its own length and the magic word.
    end = size - 4 - len(_MAGIC)
    blocks.check(end, size)
    (length,) = struct.unpack_from("<i", content, end)
    if not 0 < length <= end - at:
        raise ValueError("it has no footer where one belongs")
    blocks.check(end - length, end)


def _place(part: pa.Buffer | None, content: pa.Buffer, path: Path) -> int:
    """Where a column's buffer begins in the file; DataError where it is not in the file."""
    if part is None or not part.size:
        return 0
    # Else it is in memory of its own, which advice for files would destroy.
    if not content.address <= part.address <= content.address + content.size - part.size:
        raise DataError(f"{path} is compressed: its tokens cannot be mapped. Build the folder again.")
    return part.address - content.address

"""Memory-mapped shard: documents, lengths and names as views, with checksum blocks verified before use.

Each ``NNNNN.arrow`` is an Arrow IPC file with one record batch and one row per document: ``tokens`` (large_list of
uint16 or uint32, by vocabulary), ``source`` (int16), ``hash`` (uint64, xxh3_64 of the text), ``name`` (string).
Conversation folders also have ``counted`` (large_list of int64): spans of target tokens as pairs of bounds. Folders
with pairs have ``source_tokens``, with the type of ``tokens``: each document's encoder input. If paragraphs are kept,
``paragraphs`` (large_list of int64) has the start of every paragraph but the first. Folders of images have ``label``
(int32), a class index or -1, and their ``tokens`` may be uint8. In folders of preferences ``source_tokens`` is the
prompt, ``tokens`` has both replies, ``second`` (int64) is the start of the second one, and ``label`` is 1, or 0 for an
undesirable reply.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_pipeline.shards.block_checksum import RECOVERY_HINT, ChecksumBlocks, advise, read_checksum_file
from data_pipeline.shards.column import OFFSET, TokenColumn, buffer_offset, offsets_error
from data_pipeline.shards.file_states import FileState, cheapest_state, file_state, open_file_state
from data_pipeline.shards.manifest import IMAGES, MANIFEST_FILE, PREFERENCES, ShardEntry
from longctx.errors import DataError
from longctx.files import check_link
from longctx.untrusted import git_lfs
from longctx.untrusted.strict_json import NotFetchedError, check_fetched

_NAME_OFFSET = 4
"""Bytes per offset into the names."""
SOURCE = "source_tokens"
"""Column with the source side of pairs."""
TARGET_RUNS, PARAGRAPHS = "counted", "paragraphs"
"""Columns with lists of int64: spans of target tokens, and paragraph starts."""
LABEL = "label"
"""Column with the class indices of images, or with the labels of preferences."""
SECOND = "second"
"""Column with the start of each record's second reply in its tokens."""
_COLUMN_TITLES = {TARGET_RUNS: "counted tokens", PARAGRAPHS: "paragraphs"}
_MAGIC, _CONTINUES = b"ARROW1", -1


class MappedShard:
    """One memory-mapped file: document ``i`` is ``values[offsets[i] : offsets[i + 1]]``. Created by ``open``."""

    def __init__(
        self, path: Path, state: FileState, blocks: ChecksumBlocks, content: pa.Buffer, batch: pa.RecordBatch
    ) -> None:
        """Initialize the columns; raise DataError if they have wrong types or are not in the file."""
        self.path, self.state, self.state_now = path, state, cheapest_state(path)
        self._blocks = blocks
        _check_columns(batch, path)
        names = batch.column("name")
        self._batch = batch
        # Read names through views and not through Arrow, which would touch unverified checksum blocks.
        self._name_offsets = np.frombuffer(names.buffers()[1], np.int32)
        self._names = memoryview(names.buffers()[2] or b"")
        self._name_offsets_at, self._names_at = (buffer_offset(part, content, path) for part in names.buffers()[1:])
        self.target = TokenColumn(batch.column("tokens"), content, blocks, path)
        """Documents; for pairs the target side."""
        self.source: TokenColumn | None = None
        """Source side, for pairs."""
        if SOURCE in batch.schema.names:
            self.source = TokenColumn(batch.column(SOURCE), content, blocks, path)
        self.tokens = self.target.tokens
        self._labels: np.ndarray | None = None
        if LABEL in batch.schema.names:
            labels = batch.column(LABEL)
            self._labels = labels.to_numpy(zero_copy_only=True)
            self._labels_at = buffer_offset(labels.buffers()[1], content, path)
        self._seconds: np.ndarray | None = None
        if SECOND in batch.schema.names:
            seconds = batch.column(SECOND)
            self._seconds = seconds.to_numpy(zero_copy_only=True)
            self._seconds_at = buffer_offset(seconds.buffers()[1], content, path)
        self._lists = {
            name: _Lists(batch.column(name), content, blocks, path)
            for name in (TARGET_RUNS, PARAGRAPHS)
            if name in batch.schema.names
        }

    @classmethod
    def open(cls, folder: Path, entry: ShardEntry, *, verify: bool) -> MappedShard:
        """Map one file; raise DataError if it is not the one listed in the manifest.

        With ``verify``, every byte is verified by block checksums before it is read, including those that Arrow reads.
        """
        path = folder / entry.file
        # The file may have changed since the folder was opened. Check before mapping, so that a file swapped in between
        # is detected by the next check.
        state = check_shard_size(folder, entry, open_file_state)
        sums = None
        if verify and entry.sums:
            sums = read_checksum_file(folder, entry)
        try:
            content = _map(path, entry.bytes)
            advise(content, mmap.MADV_RANDOM)
            blocks = ChecksumBlocks(content, sums, path)
            if sums is not None:
                _check_metadata(memoryview(content), blocks)
            shard = cls(path, state, blocks, content, pa.ipc.open_file(content).get_batch(0))
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            raise read_error(path, error) from error
        shard._check_counts(entry)
        return shard

    @property
    def num_documents(self) -> int:
        """Documents in this file."""
        return len(self.target.offsets) - 1

    def name(self, row: int) -> str:
        """Return a document's name in its source."""
        at = self._name_offsets_at + _NAME_OFFSET * row
        self._blocks.check(at, at + 2 * _NAME_OFFSET)
        start, stop = int(self._name_offsets[row]), int(self._name_offsets[row + 1])
        if not 0 <= start <= stop <= len(self._names):
            raise offsets_error(self.path)
        self._blocks.check(self._names_at + start, self._names_at + stop)
        try:
            return bytes(self._names[start:stop]).decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path} is damaged: a document name is not UTF-8 ({error.reason}). {RECOVERY_HINT}"
            ) from error

    def target_runs(self, row: int) -> np.ndarray | None:
        """Return a document's spans of target tokens, as in ``EncodedDocument.target_runs``; None if all tokens are
        targets.
        """
        if TARGET_RUNS not in self._lists:
            return None
        bounds = self._lists[TARGET_RUNS].of(row)
        if len(bounds) % 2 or not self._ascends(bounds, row):
            raise DataError(f"{self.path} is damaged: its counted tokens are not valid spans. {RECOVERY_HINT}")
        return bounds

    def paragraphs(self, row: int) -> np.ndarray:
        """Return the start of each of a document's paragraphs but the first, in a folder that keeps them."""
        positions = self._lists[PARAGRAPHS].of(row)
        if not self._ascends(positions, row):
            raise DataError(f"{self.path} is damaged: its paragraphs are not within its documents. {RECOVERY_HINT}")
        return positions

    def second_starts(self, rows: np.ndarray) -> np.ndarray:
        """Return the start of the second reply in these records' tokens, int64 [n]; at least 1 and below their length.

        Raise DataError for invalid ones.
        """
        assert self._seconds is not None, f"{self.path} contains no preferences"
        size = self._seconds.itemsize
        self._blocks.check_items(self._seconds_at + size * rows, size)
        seconds = self._seconds[rows]
        if ((seconds < 1) | (seconds >= self.target.lengths_of(rows))).any():
            raise DataError(f"{self.path} is damaged: a second reply is not within its tokens. {RECOVERY_HINT}")
        return seconds

    def label(self, row: int) -> int:
        """Return an image's class index, -1 in a folder without classes; or a record's label."""
        return int(self._images_labels(row, row + 1)[0])

    def labels(self) -> np.ndarray:
        """Return the class indices or labels of all documents, int32 [documents], as a view."""
        return self._images_labels(0, self.num_documents)

    def _images_labels(self, start: int, stop: int) -> np.ndarray:
        """Return the labels of some rows."""
        assert self._labels is not None, f"{self.path} contains no labels"
        size = self._labels.itemsize
        self._blocks.check(self._labels_at + size * start, self._labels_at + size * stop)
        return self._labels[start:stop]

    def _ascends(self, positions: np.ndarray, row: int) -> bool:
        """Return whether a document's token positions are strictly ascending and within its length."""
        length = int(self.target.offsets[row + 1] - self.target.offsets[row])
        return bool((np.diff(positions, prepend=-1) > 0).all()) and (not len(positions) or positions[-1] <= length)

    def find_invalid_source(self, sources: int) -> int | None:
        """Return a ``source`` value that is not below ``sources``, if any; do not check if ``sources`` is 0."""
        column = self._batch.column("source").to_numpy(zero_copy_only=False)
        invalid = column[(column < 0) | (column >= sources)]
        if not sources or not len(invalid):
            return None
        return int(invalid[0])

    def check_kind(self, kind: str) -> None:
        """Raise DataError unless the file holds what the manifest says: images, preferences, or texts if empty."""
        found = ""
        if self._seconds is not None:
            found = PREFERENCES
        elif self._labels is not None:
            found = IMAGES
        if found != kind or (found == PREFERENCES and self._labels is None):
            raise DataError(
                f"{self.path} contains {found or 'texts'}, which {MANIFEST_FILE} does not list. {RECOVERY_HINT}"
            )

    def _check_counts(self, entry: ShardEntry) -> None:
        """Raise DataError unless document and token counts match the manifest."""
        if bool(entry.counted) > (TARGET_RUNS in self._lists):
            raise DataError(f"{self.path} has no counted tokens, but {MANIFEST_FILE} lists some. {RECOVERY_HINT}")
        has_source = self.source is not None and self.source.has(entry.documents, entry.source_tokens)
        if not self.target.has(entry.documents, entry.tokens) or has_source != bool(entry.source_tokens):
            sources_note = ""
            if entry.source_tokens:
                sources_note = f", with {entry.source_tokens} source tokens,"
            raise DataError(
                f"{self.path} does not contain the {entry.documents} documents and {entry.tokens} tokens{sources_note} "
                f"that {MANIFEST_FILE} lists. Build the folder again."
            )


class _Lists:
    """Column with lists of int64."""

    def __init__(self, column: pa.Array, content: pa.Buffer, blocks: ChecksumBlocks, path: Path) -> None:
        self._blocks, self._path = blocks, path
        self._offsets = column.offsets.to_numpy(zero_copy_only=True)
        self._values = column.values.to_numpy(zero_copy_only=True)
        buffers = (column.offsets.buffers()[1], column.values.buffers()[1])
        self._offsets_at, self._values_at = (buffer_offset(part, content, path) for part in buffers)

    def of(self, row: int) -> np.ndarray:
        """Return a row's list, as a view."""
        at = self._offsets_at + OFFSET * row
        self._blocks.check(at, at + 2 * OFFSET)
        start, stop = int(self._offsets[row]), int(self._offsets[row + 1])
        if not 0 <= start <= stop <= len(self._values):
            raise offsets_error(self._path)
        self._blocks.check(self._values_at + 8 * start, self._values_at + 8 * stop)
        return self._values[start:stop]


def check_shard_size(folder: Path, entry: ShardEntry, state_of: Callable[[Path], FileState] = file_state) -> FileState:
    """Return a shard's file state.

    Raises DataError if its size differs from the manifest's, or if it is a link out of the folder.
    """
    path = folder / entry.file
    try:
        if path.is_symlink():
            check_link(folder, entry.file)
        state = state_of(path)
    except OSError as error:
        raise read_error(path, error) from error
    if state[0] != entry.bytes:
        if _is_pointer(path):
            raise DataError(f"{path} is a Git LFS pointer: {git_lfs.FETCH_HINT}.")
        raise DataError(f"{path} has {state[0]} bytes, but {MANIFEST_FILE} lists {entry.bytes}. {RECOVERY_HINT}")
    return state


def _is_pointer(path: Path) -> bool:
    """Return whether a Git LFS pointer takes the shard's place."""
    try:
        check_fetched(path)
    except NotFetchedError:
        return True
    except OSError:
        return False
    return False


def read_error(path: Path, error: Exception) -> DataError:
    """Return the error for a file that is missing or not a shard."""
    if isinstance(error, FileNotFoundError):
        return DataError(f"{path} is missing, though {MANIFEST_FILE} lists it. {RECOVERY_HINT}")
    return DataError(f"{path} cannot be read as an Arrow shard ({error}). {RECOVERY_HINT}")


def _map(path: Path, size: int) -> pa.Buffer:
    """Map a file with ``size`` bytes into memory until its last view is gone."""
    # Close it immediately, since shards may exceed the limit on open files; the mapping stays.
    with pa.memory_map(str(path)) as file:
        if file.size() != size:
            raise ValueError(f"it has {file.size()} bytes, expected {size}")
        first = file.read_buffer(1)
    # Reading through Arrow would make the system read ahead entire record batches: all data in every shard.
    return pa.foreign_buffer(first.address, size, first)


def _check_columns(batch: pa.RecordBatch, path: Path) -> None:
    """Raise DataError or an Arrow error unless the columns are a shard's and their buffers are long enough."""
    tokens, names = batch.column("tokens"), batch.column("name")
    id_types = [pa.uint16(), pa.uint32()]
    if LABEL in batch.schema.names and SECOND not in batch.schema.names:
        id_types = [pa.uint8(), pa.uint16()]
    if tokens.type not in map(pa.large_list, id_types) or names.type != pa.string():
        raise DataError(f"{path} is not a shard: its tokens are {tokens.type}, its names {names.type}. {RECOVERY_HINT}")
    if batch.schema.field("source").type != pa.int16() or any(column.null_count for column in batch.columns):
        raise DataError(f"{path} is not a shard: its sources are not int16, or a value is missing. {RECOVERY_HINT}")
    if LABEL in batch.schema.names and batch.schema.field(LABEL).type != pa.int32():
        raise DataError(f"{path} is not a shard: its labels are {batch.column(LABEL).type}. {RECOVERY_HINT}")
    if SECOND in batch.schema.names and batch.schema.field(SECOND).type != pa.int64():
        problem = f"starts of second replies are {batch.column(SECOND).type}"
        raise DataError(f"{path} is not a shard: its {problem}. {RECOVERY_HINT}")
    if SOURCE in batch.schema.names and batch.column(SOURCE).type != tokens.type:
        raise DataError(f"{path} is not a shard: its source tokens are {batch.column(SOURCE).type}. {RECOVERY_HINT}")
    for name in (TARGET_RUNS, PARAGRAPHS):
        if name in batch.schema.names and batch.column(name).type != pa.large_list(pa.int64()):
            problem = f"{_COLUMN_TITLES[name]} are {batch.column(name).type}"
            raise DataError(f"{path} is not a shard: its {problem}. {RECOVERY_HINT}")
    # Check that each buffer is as long as its column requires: numpy would read past a shorter one.
    batch.validate()


def _check_metadata(content: memoryview, blocks: ChecksumBlocks) -> None:
    """Verify the checksum blocks that Arrow reads when it opens a file: two messages at the start, and the footer.

    Raises ValueError if their layout is not what the writer produces.
    """
    size = len(content)
    # The magic and two bytes; then schema and record batch, each as −1, its length, and that many bytes.
    at = len(_MAGIC) + 2
    for message in ("schema", "record batch"):
        if at + 8 > size:
            raise ValueError(f"it ends before its {message}")
        blocks.check(0, at + 8)
        marker, length = struct.unpack_from("<ii", content, at)
        at += 8 + length
        if marker != _CONTINUES or length < 0 or at > size:
            raise ValueError(f"its {message} is missing or misplaced")
        blocks.check(0, at)
    # The footer ends with its own length and the magic.
    end = size - 4 - len(_MAGIC)
    blocks.check(end, size)
    (length,) = struct.unpack_from("<i", content, end)
    if not 0 < length <= end - at:
        raise ValueError("its footer is missing or misplaced")
    blocks.check(end - length, end)

"""Shard reader: tokenized documents in Arrow files, memory-mapped, checksummed and readable by plain pyarrow."""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_pipeline.shards.block_checksum import RECOVERY_HINT
from data_pipeline.shards.column import TokenColumn
from data_pipeline.shards.local_copies import LocalCopy, open_folder
from data_pipeline.shards.manifest import Manifest, ShardEntry
from data_pipeline.shards.mapped import MappedShard, check_shard_size, read_error
from data_pipeline.shards.references import References, read_references
from data_pipeline.stores.urls import Location, ObjectPath
from longctx.errors import DataError
from longctx.images.image_format import ImageFormat
from longctx.tokenizer import Tokenizer, load_tokenizer
from longctx.tokenizer.embedding_rows import without_row
from longctx.tokenizer.image_tokenizer import ImageTokenizer

Side = Literal["target", "source"]
"""Side of a pair: the predicted target, or the source that an encoder reads. Documents without a source are targets."""

MAX_MAPPED = 4096
"""Shards mapped at once per folder. Linux limits a process to 65,530 mappings by default (``vm.max_map_count``), and
libraries use some thousands."""


class ShardSet:
    """A shard folder opened for reading: all documents by number, as views into memory-mapped files.

    Opening reads only the manifest, and no per-document data is kept. A file is mapped on first access, at most
    ``max_mapped`` at once; beyond that the least recently used one is unmapped. A view keeps its own file mapped.
    Threads may share a set.

    Data touched by a read is verified by its block checksums, once per mapping. DataError names file and bytes before
    any damaged data is returned. Reading lengths, or all tokens in a shard, also checks that the file is still the
    mapped one; reading a single document does not, so call ``check_files`` before a batch of them.
    """

    rows: int | None = None

    def __init__(
        self, folder: Path, manifest: Manifest, *, verify: bool, max_mapped: int, copy: LocalCopy | None
    ) -> None:
        self.folder, self.manifest, self.padding, self.first_documents = folder, manifest, manifest.padding, (0,)
        self.copy = copy
        """Copy that fetches the shards in ``folder`` on use; None if the folder is mapped in place."""
        self.verifies_reads = verify and manifest.has_block_checksum
        """True if reads are verified. Folders from earlier releases have no block checksums."""
        self._max_mapped = max_mapped
        self._mapped, self._lock = OrderedDict[int, MappedShard](), threading.Lock()
        if copy is None:
            for entry in manifest.shards:
                # Cheap, and sufficient to detect a truncated copy.
                check_shard_size(folder, entry)
        self._first_document = list(accumulate((entry.documents for entry in manifest.shards), initial=0))
        self.num_documents = self._first_document[-1]
        self.num_tokens = sum(entry.tokens for entry in manifest.shards)
        """Tokens in all shards, including document begin and end tokens."""
        # If all shards may be mapped, the least recently used one need not be tracked.
        self._maps_all = len(manifest.shards) <= max_mapped

    @classmethod
    def open(
        cls, folder: str | Path | ObjectPath, *, verify: bool = True, max_mapped: int = MAX_MAPPED, cache: str = ""
    ) -> ShardSet:
        """Open a folder, or the copy of a packed or remote one; ``cache`` overrides where copies are stored.

        ``DataError`` names the missing or truncated file. File sizes are checked here, everything further on use:
        counts and offsets, and with ``verify`` the block checksums, if the folder has them.
        """
        found, manifest, copy = open_folder(folder, cache)
        return cls(found, manifest, verify=verify, max_mapped=max_mapped, copy=copy)

    def check_files(self, documents: Iterable[int]) -> None:
        """Raise DataError if a file with these documents was truncated, removed or replaced since it was mapped.

        Reading mapped memory that the file no longer has would kill the process with a signal, without a message. So
        call this once per batch, right before it is read. A file that was written to is mapped and verified again.
        """
        for number in {bisect.bisect_right(self._first_document, document) - 1 for document in documents}:
            self._current(number)

    def lengths_of(self, documents: np.ndarray, side: Side = "target") -> np.ndarray:
        """Return each document's token count [n], int64.

        Fastest in ascending order: each shard is then visited once. Raises DataError for invalid offsets.
        """
        lengths, first = np.empty(len(documents), np.int64), self._first_document
        # One check and lookup per span of documents in the same shard, not one per document.
        for number, part in _runs(np.searchsorted(first, documents, side="right") - 1):
            lengths[part] = _column(self._current(number), side).lengths_of(documents[part] - first[number])
        return lengths

    def longest_document(self, side: Side = "target") -> int:
        """Return the longest document's token count, or 0; reads all shards' offsets, 8 bytes per document."""
        numbers = range(len(self.manifest.shards))
        return max((_column(self._current(number), side).longest() for number in numbers), default=0)

    def document(self, index: int) -> np.ndarray:
        """Return a read-only view of document ``index`` (uint16, uint32); raise DataError for invalid offsets."""
        return self.slice(index, 0)

    def slice(self, index: int, start: int, stop: int | None = None) -> np.ndarray:
        """Return tokens ``start`` to ``stop`` in document ``index``, clipped to its end; read only their checksum
        blocks.
        """
        shard, row = self._find(index)
        return shard.tokens(row, start, stop)

    def slices(self, pieces: Iterable[tuple[int, int, int]], side: Side = "target") -> list[np.ndarray]:
        """Return ``slice`` for each token span (document, start, stop), after ``check_files``: each file is checked
        once.
        """
        found: list[np.ndarray] = []
        first_document, readers = self._first_document, dict[int, Callable[[int, int, int], np.ndarray]]()
        for document, start, stop in pieces:
            number = bisect.bisect_right(first_document, document) - 1
            # Check and map each file once per call; the closure then reads without a lock.
            tokens_of = readers.get(number)
            if tokens_of is None:
                tokens_of = readers[number] = _column(self._current(number), side).tokens
            found.append(tokens_of(document - first_document[number], start, stop))
        return found

    @property
    def is_masked(self) -> bool:
        """True if the folder records target tokens."""
        return bool(self.manifest.num_targets)

    def target_runs(self, index: int) -> np.ndarray | None:
        """Return the spans of target tokens in document ``index``, as in ``EncodedDocument.target_runs``; None if all
        tokens are targets.
        """
        shard, row = self._find(index)
        return shard.target_runs(row)

    def paragraphs(self, index: int) -> np.ndarray:
        """Return the start of each paragraph in document ``index`` but the first, in a folder that keeps them."""
        shard, row = self._find(index)
        return shard.paragraphs(row)

    @property
    def is_images(self) -> bool:
        """True if every document is an image."""
        return self.manifest.is_images

    def label(self, index: int) -> int:
        """Return the class index of image ``index``, -1 in a folder without classes; or the label of a record with
        preferences.
        """
        shard, row = self._find(index)
        return shard.label(row)

    def second_starts(self, documents: np.ndarray) -> np.ndarray:
        """Return where the second reply starts in each record's tokens, int64 [n], in a folder of preferences."""
        starts, first = np.empty(len(documents), np.int64), self._first_document
        for number, part in _runs(np.searchsorted(first, documents, side="right") - 1):
            starts[part] = self._current(number).second_starts(documents[part] - first[number])
        return starts

    @cached_property
    def references(self) -> References | None:
        """Log-likelihoods under a reference model, if the folder has them, as they are at the first use."""
        place: Location = self.folder
        if self.copy is not None:
            place = self.copy.origin
        return read_references(place, self.manifest)

    @property
    def image_format(self) -> ImageFormat:
        """Shape, classes and palette of a folder of images; raises DataError for any other folder."""
        tokenizer = self.tokenizer()
        if not self.is_images or not isinstance(tokenizer, ImageTokenizer):
            raise DataError(
                f"{self.folder} contains no images. Build some with `longctx data build --kind images --source …`."
            )
        return tokenizer.format

    def name(self, index: int) -> str:
        """Return the name of document ``index`` in its source."""
        shard, row = self._find(index)
        return shard.name(row)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that built the folder; raise ``DataError`` if the folder contains another one."""
        return manifest_tokenizer(self.folder, self.manifest, self.rows)

    def _find(self, index: int) -> tuple[MappedShard, int]:
        """Return the shard that contains document ``index``, and the document's row in it."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        number = bisect.bisect_right(self._first_document, index) - 1
        return self._shard(number), index - self._first_document[number]

    def _shard(self, number: int) -> MappedShard:
        """Return one shard, mapped again if necessary; raise DataError if it no longer matches the manifest."""
        shard = self._mapped.get(number)
        if shard is not None and self._maps_all:
            # Skip the lock, which costs as much as the rest of a read; a dict lookup is atomic.
            return shard
        with self._lock:
            shard = self._mapped.get(number)
            if shard is None:
                shard = self._open_shard(number)
            self._mapped[number] = shard
            # Least recently used order: used shards move to the end, and the first one is evicted.
            self._mapped.move_to_end(number)
            if len(self._mapped) > self._max_mapped:
                self._mapped.popitem(last=False)
        return shard

    def _current(self, number: int) -> MappedShard:
        """Return one shard; raise DataError if its file is no longer the mapped one."""
        if number < 0:
            raise IndexError("documents are numbered from 0")
        shard = self._mapped.get(number)
        if shard is not None and not _is_current(shard, self.manifest.shards[number]):
            # The file was written to, so verified checksum blocks may have changed: map and verify it again.
            with self._lock:
                self._mapped.pop(number, None)
        return self._shard(number)

    def _open_shard(self, number: int) -> MappedShard:
        """Map one file, after fetching it if the folder is a copy."""
        entry = self.manifest.shards[number]
        if self.copy is not None:
            self.copy.fetch(entry)
        shard = MappedShard.open(self.folder, entry, verify=self.verifies_reads)
        shard.check_kind(self.manifest.kind)
        return shard


def shard_tokens(shards: ShardSet, number: int) -> np.ndarray:
    """Return all tokens in one shard, document after document, as a read-only view."""
    return shards._current(number).target.all_tokens()


def shard_labels(shards: ShardSet, number: int) -> np.ndarray:
    """Return the class indices of all images in one shard, int32, as a read-only view."""
    return shards._current(number).labels()


class SourceSide:
    """Encoder inputs in a folder of pairs, numbered like its documents."""

    is_masked = False

    def __init__(self, shards: ShardSet) -> None:
        self._shards = shards
        self.padding, self.first_documents = shards.padding, shards.first_documents

    def lengths_of(self, documents: np.ndarray) -> np.ndarray:
        """Return the sources' lengths, as ``ShardSet.lengths_of`` does."""
        return self._shards.lengths_of(documents, "source")

    def slices(self, pieces: Iterable[tuple[int, int, int]]) -> list[np.ndarray]:
        """Return the sources' tokens, as ``ShardSet.slices`` does."""
        return self._shards.slices(pieces, "source")

    def target_runs(self, index: int) -> None:
        """Return None: source tokens are never predicted."""


def _column(shard: MappedShard, side: Side) -> TokenColumn:
    """Return one side of a shard's documents."""
    if side == "target":
        return shard.target
    assert shard.source is not None, f"{shard.path} contains no pairs"
    return shard.source


def open_for_model(folder: str | Path | ObjectPath, *, vocab_size: int, **options: Any) -> ShardSet:
    """Open a folder as ``ShardSet.open`` does, for a model with ``vocab_size`` ids.

    Raises DataError if a shard contains a larger id. A tokenizer may have more ids than its model: only the ids in the
    shards matter.
    """
    shards = ShardSet.open(folder, **options)
    shards.rows = vocab_size
    # Padding is never a target, so any id in the model will do.
    if shards.padding >= vocab_size:
        shards.padding = 0
    if shards.manifest.vocab_size <= vocab_size:
        return shards
    for entry in shards.manifest.shards:
        if not entry.num_ids:
            raise DataError(
                f"{shards.folder} allows ids below {shards.manifest.vocab_size}, the model below {vocab_size}, and the "
                "release that built it did not record the largest id. Build it again with `longctx data build`."
            )
        if entry.num_ids > vocab_size:
            named = without_row(shards.tokenizer(), entry.num_ids - 1, vocab_size)
            raise DataError(f"{shards.folder / entry.file} holds the token {named}")
    return shards


def check_outputs(shards: ShardSet, rows: int) -> None:
    """Raise DataError if a folder holds an id that a model with outputs for the first ``rows`` ids cannot predict."""
    if shards.manifest.vocab_size <= rows:
        return
    for entry in shards.manifest.shards:
        # Not recorded by older releases: then the tokenizer's size is the only bound.
        largest = (entry.num_ids or shards.manifest.vocab_size) - 1
        if largest >= rows:
            raise DataError(
                f"{shards.folder / entry.file} holds token ids up to {largest}, and the model predicts ids 0 to "
                f"{rows - 1} only (model.output_vocab_size={rows}).\nTrain a model with model.output_vocab_size=0, or "
                "build the data without such ids."
            )


def _runs(shards: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yield each span of equal numbers [n] as its number and slice."""
    ends = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(shards)]
    for start, stop in pairwise(ends):
        if start < stop:
            yield int(shards[start]), slice(start, stop)


def manifest_tokenizer(folder: Path, manifest: Manifest, rows: int | None = None) -> Tokenizer:
    """Return the shards' tokenizer for a model with ``rows`` rows; raise ``DataError`` if it did not build them."""
    tokenizer = load_tokenizer(folder)
    if tokenizer.fingerprint != manifest.tokenizer:
        raise DataError(
            f"tokenizer {tokenizer.path} does not match these shards "
            f"(fingerprint {tokenizer.fingerprint}, expected {manifest.tokenizer}). Restore the original."
        )
    if rows is not None:
        return tokenizer.for_model(rows)
    return tokenizer


def _is_current(shard: MappedShard, entry: ShardEntry) -> bool:
    """Return whether a file is as it was mapped; raise DataError if it was replaced, resized or removed."""
    try:
        state = shard.state_now(shard.path)
    except OSError as error:
        raise read_error(shard.path, error) from error
    if state == shard.state:
        return True
    if state[0] != entry.bytes:
        raise DataError(
            f"{shard.path} changed while it was being read: it has {state[0]} bytes and had {entry.bytes}. "
            f"{RECOVERY_HINT}"
        )
    # A new inode: the mapping still shows the old file, and going on would mix two versions of the data.
    if state[3] != shard.state[3]:
        raise DataError(
            f"{shard.path} was replaced by another file while it was being read. Start again once "
            "`longctx data verify DIR` reports no problems."
        )
    return False


class Corpus:
    """Documents in several folders, concatenated in folder order.

    Raises DataError if the folders were built with different tokenizers.
    """

    def __init__(self, folders: Sequence[ShardSet]) -> None:
        self.folders = tuple(folders)
        self.first_document = list(accumulate((shards.num_documents for shards in folders), initial=0))
        """Each folder's first document number, followed by the total."""
        self.first_documents = self.first_document[:-1]
        first = self.folders[0]
        for shards in self.folders[1:]:
            if shards.manifest.kind != first.manifest.kind:
                kinds = sorted((shards.manifest.kind, first.manifest.kind), reverse=True)
                raise DataError(
                    f"One of {first.folder} and {shards.folder} contains {kinds[0]}, the other {kinds[1] or 'texts'}. "
                    "Read only one kind."
                )
            if shards.manifest.tokenizer != first.manifest.tokenizer:
                raise DataError(
                    f"{first.folder} and {shards.folder} were built with different tokenizers, so their ids "
                    f"differ.\nBuild one of them again: longctx data build --tokenizer {first.folder} …"
                )
        self.padding = first.padding

    def folder_of(self, document: int) -> int:
        """Return the index of the folder that contains a document."""
        return bisect.bisect_right(self.first_document, document) - 1

    def check_files(self, documents: Iterable[int]) -> None:
        """Check the files of documents in any folder, as ``ShardSet.check_files`` does."""
        # Call each folder once, however its documents are distributed over the rows.
        own: dict[int, set[int]] = {}
        for document in documents:
            number = self.folder_of(document)
            own.setdefault(number, set()).add(document - self.first_document[number])
        for number, found in own.items():
            self.folders[number].check_files(found)

    def lengths_of(self, documents: np.ndarray, side: Side = "target") -> np.ndarray:
        """Return ``ShardSet.lengths_of`` for documents in any folder."""
        return self._values(documents, lambda shards, own: shards.lengths_of(own, side))

    def second_starts(self, documents: np.ndarray) -> np.ndarray:
        """Return ``ShardSet.second_starts`` for records in any folder."""
        return self._values(documents, ShardSet.second_starts)

    def _values(self, documents: np.ndarray, read: Callable[[ShardSet, np.ndarray], np.ndarray]) -> np.ndarray:
        """Read one int64 per document, folder by folder."""
        values = np.empty(len(documents), np.int64)
        folders = np.searchsorted(self.first_document, documents, side="right") - 1
        for number in np.unique(folders):
            own = folders == number
            values[own] = read(self.folders[number], documents[own] - self.first_document[number])
        return values

    def slice(self, index: int, start: int, stop: int) -> np.ndarray:
        """Return ``ShardSet.slice`` for a document in any folder."""
        number = self.folder_of(index)
        return self.folders[number].slice(index - self.first_document[number], start, stop)

    def slices(self, pieces: Iterable[tuple[int, int, int]], side: Side = "target") -> list[np.ndarray]:
        """Return ``ShardSet.slices`` for documents in any folder."""
        # Call each folder once with its token spans, and record their positions in the full list.
        own: dict[int, list[tuple[int, int, int]]] = {}
        positions: dict[int, list[int]] = {}
        place = -1
        for place, (document, start, stop) in enumerate(pieces):
            number = self.folder_of(document)
            own.setdefault(number, []).append((document - self.first_document[number], start, stop))
            positions.setdefault(number, []).append(place)
        found: list[Any] = [None] * (place + 1)
        for number, of_folder in own.items():
            for place, tokens in zip(positions[number], self.folders[number].slices(of_folder, side), strict=True):
                found[place] = tokens
        return found

    @property
    def is_masked(self) -> bool:
        """True if one of the folders records target tokens."""
        return any(shards.is_masked for shards in self.folders)

    def target_runs(self, index: int) -> np.ndarray | None:
        """Return ``ShardSet.target_runs`` for a document in any folder."""
        number = self.folder_of(index)
        return self.folders[number].target_runs(index - self.first_document[number])

    @property
    def is_images(self) -> bool:
        """True if every document is an image: folders with one tokenizer are of one kind."""
        return self.folders[0].is_images

    def label(self, index: int) -> int:
        """Return ``ShardSet.label`` for an image or record in any folder."""
        number = self.folder_of(index)
        return self.folders[number].label(index - self.first_document[number])

    def name(self, document: int) -> str:
        """Return a document's name in its source."""
        number = self.folder_of(document)
        return self.folders[number].name(document - self.first_document[number])

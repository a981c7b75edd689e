"""Read shards: tokenized documents in Arrow files, memory-mapped, checksummed and readable by plain pyarrow."""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_pipeline.shards.column import TokenColumn
from data_pipeline.shards.copies import LocalCopy, open_folder
from data_pipeline.shards.manifest import Manifest, ShardEntry
from data_pipeline.shards.mapped import MappedShard, check_size, unreadable
from data_pipeline.shards.sums import ADVICE
from data_pipeline.stores.urls import ObjectPath
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer, load_tokenizer
from longctx.tokenizer.rows import without_row

Side = Literal["target", "source"]
"""Of pairs: what is predicted, and what an encoder reads. Documents without a source are targets."""

MAX_MAPPED = 4096
"""Shards of a folder that are mapped at once. Linux gives a process 65,530 mappings unless it is told otherwise
(``vm.max_map_count``), and libraries take some thousands."""


class ShardSet:
    """A shard folder opened for reading: all documents by number, as views into memory-mapped files.

    Opening reads the manifest alone; nothing is kept for each document. A file is mapped when something of it is
    asked for, at most ``max_mapped`` at once; the one that was used longest ago is unmapped for another. A view keeps
    its own file mapped as long as it lives. Threads may share a set.

    What a read touches is checked by the sums of its blocks, once for each mapping. DataError names file and bytes
    before anything wrong is returned. Lengths, and all tokens of a shard, also ask whether the file is still the one
    that was mapped; a single document does not: call ``check_files`` before a batch of them.
    """

    rows: int | None = None

    def __init__(
        self, folder: Path, manifest: Manifest, *, verify: bool, max_mapped: int, copy: LocalCopy | None
    ) -> None:
        self.folder, self.manifest, self.padding, self.first_documents = folder, manifest, manifest.padding, (0,)
        self.copy = copy
        """What ``folder`` is a copy of, of which shards come when they are used; None where it is nobody's copy."""
        self.verifies_reads = verify and manifest.has_sums
        """Whether what is read is checked. Folders of earlier releases have no sums."""
        self._max_mapped = max_mapped
        self._mapped, self._lock = OrderedDict[int, MappedShard](), threading.Lock()
        if copy is None:
            for entry in manifest.shards:
                # Cheap, and enough for a copy that was cut short.
                check_size(folder, entry)
        self._first_document = list(accumulate((entry.documents for entry in manifest.shards), initial=0))
        self.num_documents = self._first_document[-1]
        self.num_tokens = sum(entry.tokens for entry in manifest.shards)
        """Tokens of all shards, document begins and ends included."""
        # Where all of them may be mapped, nobody has to know which was used last.
        self._maps_all = len(manifest.shards) <= max_mapped

    @classmethod
    def open(
        cls, folder: str | Path | ObjectPath, *, verify: bool = True, max_mapped: int = MAX_MAPPED, cache: str = ""
    ) -> ShardSet:
        """Open a folder, or the copy of one that is packed or in a store, in ``cache`` if that is given.

        ``DataError`` names the file that is missing or truncated. Sizes of files are checked here, everything else as
        it is used: counts and offsets, and with ``verify`` the sums of blocks, where the folder has them.
        """
        found, manifest, copy = open_folder(folder, cache)
        return cls(found, manifest, verify=verify, max_mapped=max_mapped, copy=copy)

    def check_files(self, documents: Iterable[int]) -> None:
        """DataError where a file of these documents was cut short, removed or replaced since it was mapped.

        To read mapped memory that the file no longer has would end the process by a signal, without a word. So ask
        once for each batch, right before it is read. A file that was written to is mapped and checked anew.
        """
        for number in {bisect.bisect_right(self._first_document, document) - 1 for document in documents}:
            self._current(number)

    def lengths_of(self, documents: np.ndarray, side: Side = "target") -> np.ndarray:
        """Tokens of each of these documents [n], int64. Fastest where they ascend: then each shard is looked at once.

        DataError for offsets that cannot be right.
        """
        lengths, first = np.empty(len(documents), np.int64), self._first_document
        for number, part in _runs(np.searchsorted(first, documents, side="right") - 1):
            lengths[part] = _column(self._current(number), side).lengths_of(documents[part] - first[number])
        return lengths

    def longest_document(self, side: Side = "target") -> int:
        """Tokens of the longest document; 0 without one. Reads the offsets of all shards, 8 bytes a document."""
        numbers = range(len(self.manifest.shards))
        return max((_column(self._current(number), side).longest() for number in numbers), default=0)

    def document(self, index: int) -> np.ndarray:
        """All tokens of document ``index``, a read-only view (uint16 or uint32); DataError for wrong offsets."""
        return self.slice(index, 0)

    def slice(self, index: int, start: int, stop: int | None = None) -> np.ndarray:
        """Tokens ``start`` to ``stop`` of document ``index``, none beyond its end; their blocks alone are touched."""
        shard, row = self._find(index)
        return shard.tokens(row, start, stop)

    def slices(self, pieces: Iterable[tuple[int, int, int]], side: Side = "target") -> list[np.ndarray]:
        """``slice`` of each piece (document, start, stop), behind ``check_files``: each file is looked at once."""
        found: list[np.ndarray] = []
        first_document, checked = self._first_document, dict[int, Callable[[int, int, int], np.ndarray]]()
        for document, start, stop in pieces:
            number = bisect.bisect_right(first_document, document) - 1
            tokens_of = checked.get(number)
            if tokens_of is None:
                tokens_of = checked[number] = _column(self._current(number), side).tokens
            found.append(tokens_of(document - first_document[number], start, stop))
        return found

    @property
    def is_masked(self) -> bool:
        """Whether the folder says which tokens count."""
        return bool(self.manifest.counted)

    def counted(self, index: int) -> np.ndarray | None:
        """Return the runs of document ``index`` that count, as ``EncodedDocument.counted`` has them; None for all."""
        shard, row = self._find(index)
        return shard.counted(row)

    def paragraphs(self, index: int) -> np.ndarray:
        """Return the first tokens of document ``index``'s paragraphs but the first one; of a folder that keeps them."""
        shard, row = self._find(index)
        return shard.paragraphs(row)

    def name(self, index: int) -> str:
        """The name of document ``index`` in its source."""
        shard, row = self._find(index)
        return shard.name(row)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the folder; ``DataError`` if the file beside the shards is another one."""
        return manifest_tokenizer(self.folder, self.manifest, self.rows)

    def _find(self, index: int) -> tuple[MappedShard, int]:
        """The shard of document ``index``, and the document's number there."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        number = bisect.bisect_right(self._first_document, index) - 1
        return self._shard(number), index - self._first_document[number]

    def _shard(self, number: int) -> MappedShard:
        """One shard, mapped again where it no longer is; DataError where it is no longer as the manifest says."""
        shard = self._mapped.get(number)
        if shard is not None and self._maps_all:
            # Without the lock, which costs as much as the rest of a read.
            return shard
        with self._lock:
            shard = self._mapped.get(number)
            if shard is None:
                shard = _open_shard(self, number)
            self._mapped[number] = shard
            # Last among the mapped ones; the first goes where there are too many.
            self._mapped.move_to_end(number)
            if len(self._mapped) > self._max_mapped:
                self._mapped.popitem(last=False)
        return shard

    def _current(self, number: int) -> MappedShard:
        """One shard; DataError where its file is no longer the one that was mapped."""
        if number < 0:
            raise IndexError("documents are numbered from 0")
        shard = self._mapped.get(number)
        if shard is not None and not _is_unchanged(shard, self.manifest.shards[number]):
            # Written to: what was found right may be so no longer.
            with self._lock:
                self._mapped.pop(number, None)
        return self._shard(number)


def shard_tokens(shards: ShardSet, number: int) -> np.ndarray:
    """All tokens of one shard, one document after the other, as a read-only view."""
    return shards._current(number).target.all_tokens()


class SourceSide:
    """What an encoder reads beside the documents of a folder of pairs, under the documents' numbers."""

    is_masked = False

    def __init__(self, shards: ShardSet) -> None:
        self._shards = shards
        self.padding, self.first_documents = shards.padding, shards.first_documents

    def lengths_of(self, documents: np.ndarray) -> np.ndarray:
        """As ``ShardSet.lengths_of``."""
        return self._shards.lengths_of(documents, "source")

    def slices(self, pieces: Iterable[tuple[int, int, int]]) -> list[np.ndarray]:
        """As ``ShardSet.slices``."""
        return self._shards.slices(pieces, "source")

    def counted(self, index: int) -> None:
        """None: nothing of it is predicted."""


def _column(shard: MappedShard, side: Side) -> TokenColumn:
    """One side of a shard's documents."""
    if side == "target":
        return shard.target
    assert shard.source is not None, f"{shard.path} holds no pairs"
    return shard.source


def open_for_model(folder: str | Path | ObjectPath, *, vocab_size: int, **options: Any) -> ShardSet:
    """Open a folder as ``ShardSet.open`` does, for a model of so many ids; DataError if a shard holds another id.

    A tokenizer may have more ids than its model: what counts is which of them the shards hold.
    """
    shards = ShardSet.open(folder, **options)
    shards.rows = vocab_size
    # Its target never counts, so any id that the model has serves.
    if shards.padding >= vocab_size:
        shards.padding = 0
    if shards.manifest.vocab_size <= vocab_size:
        return shards
    for entry in shards.manifest.shards:
        if not entry.num_ids:
            raise DataError(
                f"{shards.folder} has ids below {shards.manifest.vocab_size}, the model {vocab_size}, and an earlier "
                "release built it, which did not record the ids that occur. Build it again with `longctx data build`."
            )
        if entry.num_ids > vocab_size:
            named = without_row(shards.tokenizer(), entry.num_ids - 1, vocab_size)
            raise DataError(f"{shards.folder / entry.file} holds the token {named}")
    return shards


def _runs(shards: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yield each run of equal numbers [n]: the number, and where it stands."""
    ends = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(shards)]
    for start, stop in pairwise(ends):
        if start < stop:
            yield int(shards[start]), slice(start, stop)


def _open_shard(shards: ShardSet, number: int) -> MappedShard:
    """Map one file, brought here first where the folder is a copy."""
    entry = shards.manifest.shards[number]
    if shards.copy is not None:
        shards.copy.bring(entry)
    return MappedShard.open(shards.folder, entry, verify=shards.verifies_reads)


def manifest_tokenizer(folder: Path, manifest: Manifest, rows: int | None = None) -> Tokenizer:
    """The tokenizer beside the shards, for a model of so many rows; ``DataError`` if it did not make them."""
    tokenizer = load_tokenizer(folder)
    if tokenizer.fingerprint != manifest.tokenizer:
        raise DataError(
            f"{tokenizer.path} is not the tokenizer that made these shards "
            f"(fingerprint {tokenizer.fingerprint}, wanted {manifest.tokenizer}). Put the original back."
        )
    if rows is not None:
        return tokenizer.for_model(rows)
    return tokenizer


def _is_unchanged(shard: MappedShard, entry: ShardEntry) -> bool:
    """Whether nobody wrote to a file since it was mapped; DataError where it is another one, or gone."""
    try:
        state = shard.state_now(shard.path)
    except OSError as error:
        raise unreadable(shard.path, error) from error
    if state == shard.state:
        return True
    if state[0] != entry.bytes:
        raise DataError(
            f"{shard.path} changed while it was being read: it has {state[0]} bytes and had {entry.bytes}. {ADVICE}"
        )
    if state[3] != shard.state[3]:
        raise DataError(
            f"{shard.path} was replaced by another file while it was being read. Start again once the data is whole: "
            "`longctx data verify DIR` says so."
        )
    return False


class Corpus:
    """Documents of several folders, those of one behind those of the one before.

    DataError for folders that were built with different tokenizers.
    """

    def __init__(self, folders: Sequence[ShardSet]) -> None:
        self.folders = tuple(folders)
        self.first_document = list(accumulate((shards.num_documents for shards in folders), initial=0))
        """The number of each folder's first document; one more entry for their end."""
        self.first_documents = self.first_document[:-1]
        first = self.folders[0]
        for shards in self.folders[1:]:
            if shards.manifest.tokenizer != first.manifest.tokenizer:
                raise DataError(
                    f"{first.folder} and {shards.folder} were built with different tokenizers: ids would mean other "
                    f"text.\nBuild one of them again: longctx data build --tokenizer {first.folder} …"
                )
        self.padding = first.padding

    def folder_of(self, document: int) -> int:
        """The number of the folder that has a document."""
        return bisect.bisect_right(self.first_document, document) - 1

    def check_files(self, documents: Iterable[int]) -> None:
        """``ShardSet.check_files`` for documents of any folder."""
        # Each folder is asked once, however its documents are strewn over the rows.
        own: dict[int, set[int]] = {}
        for document in documents:
            number = self.folder_of(document)
            own.setdefault(number, set()).add(document - self.first_document[number])
        for number, found in own.items():
            self.folders[number].check_files(found)

    def lengths_of(self, documents: np.ndarray) -> np.ndarray:
        """``ShardSet.lengths_of`` for documents of any folder."""
        lengths = np.empty(len(documents), np.int64)
        folders = np.searchsorted(self.first_document, documents, side="right") - 1
        for number in np.unique(folders):
            own = folders == number
            lengths[own] = self.folders[number].lengths_of(documents[own] - self.first_document[number])
        return lengths

    def slice(self, index: int, start: int, stop: int) -> np.ndarray:
        """``ShardSet.slice`` of a document of any folder."""
        number = self.folder_of(index)
        return self.folders[number].slice(index - self.first_document[number], start, stop)

    def slices(self, pieces: Iterable[tuple[int, int, int]]) -> list[np.ndarray]:
        """``ShardSet.slices`` of documents of any folder."""
        # Each folder is asked once: what its pieces are, and where they stand among all.
        own: dict[int, list[tuple[int, int, int]]] = {}
        places: dict[int, list[int]] = {}
        place = -1
        for place, (document, start, stop) in enumerate(pieces):
            number = self.folder_of(document)
            own.setdefault(number, []).append((document - self.first_document[number], start, stop))
            places.setdefault(number, []).append(place)
        found: list[Any] = [None] * (place + 1)
        for number, of_folder in own.items():
            for place, tokens in zip(places[number], self.folders[number].slices(of_folder), strict=True):
                found[place] = tokens
        return found

    @property
    def is_masked(self) -> bool:
        """Whether one of the folders says which tokens count."""
        return any(shards.is_masked for shards in self.folders)

    def counted(self, index: int) -> np.ndarray | None:
        """``ShardSet.counted`` of a document of any folder."""
        number = self.folder_of(index)
        return self.folders[number].counted(index - self.first_document[number])

    def name(self, document: int) -> str:
        """The name of a document in its source."""
        number = self.folder_of(document)
        return self.folders[number].name(document - self.first_document[number])

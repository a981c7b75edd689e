"""``Corpus``: the shard folders of a run as one numbering of documents."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from data_pipeline.shards.reader import ShardSet
from longctx.errors import DataError


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

    def document(self, document: int) -> np.ndarray:
        """``ShardSet.document`` of a document of any folder."""
        number = self.folder_of(document)
        return self.folders[number].document(document - self.first_document[number])

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

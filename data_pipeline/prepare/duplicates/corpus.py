"""The signed parts of a source as one: documents by their number in the source's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np

from data_pipeline.prepare.duplicates.signed import SignedPart

SLICE_DOCUMENTS = 1 << 22
"""About how many documents' keys are sorted at once: of a larger corpus they are taken by their first bits."""

_MAPPED_NAMES = 64
"""Parts whose names are mapped at once, two open files each."""


class SignedCorpus:
    """All parts of a source."""

    def __init__(self, parts: Sequence[SignedPart]) -> None:
        self.parts = parts
        self.starts = np.cumsum([0] + [part.documents for part in parts])
        """The number of each part's first document, and of all."""
        # Removed documents come in order, and those that stay from anywhere.
        self._names = lru_cache(maxsize=_MAPPED_NAMES)(lambda number: parts[number].names())

    def __len__(self) -> int:
        return int(self.starts[-1])

    def runs(self, column: Callable[[SignedPart], np.ndarray], leave: np.ndarray) -> Iterator[np.ndarray]:
        """Yield documents that share a key with another one, int64 [2, n]: their numbers, and those of their runs.

        A run is of one key; runs follow one another, and within one the documents are in order. ``column`` gives a
        part's keys, uint64. Documents in the mask ``leave`` are passed over.
        """
        slices = max(1, -(-len(self) // SLICE_DOCUMENTS))
        for number in range(slices):
            # Equal keys are in one slice, whatever parts they are of.
            keys, documents = self._slice(column, leave, number, slices)
            order = np.argsort(keys, kind="stable")
            keys, documents = keys[order], documents[order]
            is_first = np.ones(len(keys), dtype=bool)
            is_first[1:] = keys[1:] != keys[:-1]
            # Alone: first of its run, and so is the next one.
            is_alone = is_first & np.append(is_first[1:], True)
            numbers = np.cumsum(is_first)[~is_alone]
            yield np.stack([documents[~is_alone], numbers])

    def gather(self, documents: np.ndarray, rows: Callable[[SignedPart], np.ndarray]) -> np.ndarray:
        """The rows of documents, in any order of parts."""
        parts = np.searchsorted(self.starts, documents, side="right") - 1
        first = rows(self.parts[0])
        found = np.empty((len(documents), *first.shape[1:]), dtype=first.dtype)
        # Part by part: a file is mapped once for all rows that are wanted of it.
        for part in np.unique(parts):
            here = np.flatnonzero(parts == part)
            found[here] = rows(self.parts[part])[documents[here] - self.starts[part]]
        return found

    def signatures(self, documents: np.ndarray) -> np.ndarray:
        """uint16 [n, permutations]."""
        return self.gather(documents, lambda part: part.signatures)

    def facts(self, documents: np.ndarray) -> np.ndarray:
        """Rows of ``FACTS`` [n]."""
        return self.gather(documents, lambda part: part.facts)

    def name(self, document: int) -> str:
        """The name of a document."""
        part = int(np.searchsorted(self.starts, document, side="right")) - 1
        return self._names(part)[document - int(self.starts[part])]

    def _slice(
        self, column: Callable[[SignedPart], np.ndarray], leave: np.ndarray, number: int, slices: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Keys and numbers of the documents whose key falls into a slice of the keys' range."""
        keys, documents = [np.empty(0, dtype=np.uint64)], [np.empty(0, dtype=np.int64)]
        for part, start in zip(self.parts, self.starts.tolist(), strict=False):
            found = column(part)
            wanted = ~leave[start : start + part.documents]
            if slices > 1:
                wanted &= (found >> np.uint64(32)) * np.uint64(slices) >> np.uint64(32) == number
            here = np.flatnonzero(wanted)
            keys.append(found[here])
            documents.append(here + start)
        return np.concatenate(keys), np.concatenate(documents)

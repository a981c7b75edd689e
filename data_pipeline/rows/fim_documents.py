"""``FimDocuments``: documents as they are read, some with fill-in-the-middle (``rows.fim``)."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import numpy as np

from data_pipeline.rows.fim import Fim
from data_pipeline.rows.pack import Piece
from data_pipeline.shards.reader import Corpus, ShardSet


class FimDocuments:
    """Documents with fill-in-the-middle, using each folder's ``Fim``."""

    def __init__(self, documents: ShardSet | Corpus, fim_by_folder: Sequence[Fim | None]) -> None:
        assert len(fim_by_folder) == len(documents.first_documents), "one for each folder"
        self._documents, self._fim_by_folder = documents, tuple(fim_by_folder)
        self.padding, self.first_documents = documents.padding, documents.first_documents
        self.is_masked = documents.is_masked

    def check_files(self, documents: Iterable[int]) -> None:
        """Verify these documents' files before they are read."""
        self._documents.check_files(documents)

    def slices(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        """Return ``slice`` for each piece, after ``check_files``."""
        self.check_files({document for document, _, _ in pieces})
        return [self.slice(document, start, stop) for document, start, stop in pieces]

    def lengths_of(self, documents: np.ndarray) -> np.ndarray:
        """Return the length of each document [n] as it is read, int64."""
        lengths = self._documents.lengths_of(documents).copy()
        folders = np.searchsorted(self.first_documents, documents, side="right") - 1
        for number, fim in enumerate(self._fim_by_folder):
            own = folders == number
            if fim is not None and own.any():
                lengths[own] = fim.lengths(documents[own] - self.first_documents[number], lengths[own])
        return lengths

    def target_runs(self, index: int) -> np.ndarray | None:
        """Return the stored spans of target tokens: folders that record them have no fill-in-the-middle."""
        return self._documents.target_runs(index)

    def slice(self, index: int, start: int, stop: int) -> np.ndarray:
        """Return tokens ``start`` to ``stop`` in a document as it is read, clipped to its end.

        Reads only the stored tokens needed for this range.
        """
        folder = bisect.bisect_right(self.first_documents, index) - 1
        fim, own = self._fim_by_folder[folder], index - self.first_documents[folder]
        if fim is None:
            return self._documents.slice(index, start, stop)
        length = int(self._documents.lengths_of(np.array([index]))[0])
        # A document that is not selected keeps its length, so equal lengths mean that it is read unchanged.
        read_as = int(fim.lengths(np.array([own]), np.array([length]))[0])
        if read_as == length:
            return self._documents.slice(index, start, stop)
        found: list[np.ndarray] = [np.empty(0, np.int32)]
        stop = min(stop, read_as)
        # Walk the segments that overlap the range; ``at`` is the running offset in the document as it is read.
        for segment in range(start // fim.segment_tokens, -(-stop // fim.segment_tokens)):
            at = segment * fim.segment_tokens
            for part in fim.parts(own, length, segment):
                size = len(part) if isinstance(part, list) else part[1] - part[0]
                first, last = max(start - at, 0), min(stop - at, size)
                at += size
                if first >= last:
                    continue
                if isinstance(part, list):
                    found.append(np.array(part[first:last], np.int32))
                else:
                    found.append(self._documents.slice(index, part[0] + first, part[0] + last))
        return np.concatenate(found)


Documents = ShardSet | Corpus | FimDocuments
"""Data that rows are read from."""

"""Which documents of a corpus belong together: equal texts, and near duplicates joined to groups by their pairs.

Memory is 17 bytes a document, the slice of keys that is sorted (``SLICE_DOCUMENTS``), and the signatures of the pairs
that are compared at once. Everything else stays in the parts' files, of which the system keeps what it has room for.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from data_pipeline.prepare.duplicates.rule import DuplicateRule
from data_pipeline.prepare.duplicates.signatures import similarity
from data_pipeline.prepare.duplicates.signed import SignedCorpus

_PAIRS_AT_ONCE = 1 << 16
_MOST_LEADERS = 1024
"""Documents of a band's run that all others of the run are compared with; those after them are among the others only.

Without it a million documents that share a licence text, and are not similar beyond it, would take a week.
"""


def find_copies(corpus: SignedCorpus) -> np.ndarray:
    """For each document the first one with the same text, itself where there is none: int64 [documents].

    The same text is the same xxh3_128 and the same number of bytes. (64 bits would not do: among ten billion documents
    two different texts would be expected to meet.)
    """
    firsts = np.arange(len(corpus))
    for documents, _ in corpus.runs(lambda part: part.facts["low"], np.zeros(len(corpus), dtype=bool)):
        facts = corpus.facts(documents)
        order = np.lexsort((documents, facts["text_bytes"], facts["high"], facts["low"]))
        documents, facts = documents[order], facts[order]
        is_first = np.ones(len(documents), dtype=bool)
        for name in ("low", "high", "text_bytes"):
            differs = facts[name][1:] != facts[name][:-1]
            is_first[1:] = differs if name == "low" else is_first[1:] | differs
        firsts[documents] = documents[is_first][np.cumsum(is_first) - 1]
    return firsts


def find_groups(corpus: SignedCorpus, firsts: np.ndarray, rule: DuplicateRule) -> np.ndarray:
    """For each document the smallest number of its group, int64 [documents]: near duplicates, and theirs, and so on.

    Two documents are joined where they share a band and their signatures agree in at least ``rule.similarity`` of their
    values, or where they are equal.
    """
    union = _Union(firsts.copy())
    # Copies are joined already: comparing them too would only repeat what the first of them says.
    is_copy = firsts != np.arange(len(firsts))
    bands, _ = rule.bands()
    for band in range(bands):
        for documents, runs in corpus.runs(lambda part, band=band: part.bands[band], is_copy):
            for first, second in _pairs(documents, runs, union):
                alike = similarity(corpus.signatures(first), corpus.signatures(second)) >= rule.similarity
                union.join(first[alike], second[alike])
    return union.roots(np.arange(len(firsts)))


def _pairs(documents: np.ndarray, runs: np.ndarray, union: _Union) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of documents of the same run that are of different groups at that moment, some at a time.

    First each run's first document with all others of its run, then its second with those after it, and so on. Most
    runs are of one group after the first round, and cost no more.
    """
    leaders = np.flatnonzero(np.diff(runs, prepend=-1))
    stops = np.append(leaders[1:], len(runs))
    for _ in range(_MOST_LEADERS):
        waiting = stops - leaders > 1
        leaders, stops = leaders[waiting], stops[waiting]
        if not len(leaders):
            return
        others = stops - leaders - 1
        # The places of every other member behind its leader.
        at = np.repeat(leaders + 1 - np.cumsum(others) + others, others) + np.arange(others.sum())
        of = np.repeat(leaders, others)
        for start in range(0, len(at), _PAIRS_AT_ONCE):
            first, second = documents[of[start : start + _PAIRS_AT_ONCE]], documents[at[start : start + _PAIRS_AT_ONCE]]
            apart = union.roots(first) != union.roots(second)
            if apart.any():
                yield first[apart], second[apart]
        # A run that has become one group is done.
        roots = union.roots(documents[at])
        joined = roots == np.repeat(union.roots(documents[leaders]), others)
        whole = np.logical_and.reduceat(joined, np.cumsum(others) - others)
        leaders, stops = leaders[~whole] + 1, stops[~whole]


class _Union:
    """Sets of numbers that are joined; each is known by its smallest member."""

    def __init__(self, parents: np.ndarray) -> None:
        self._parents = parents

    def roots(self, numbers: np.ndarray) -> np.ndarray:
        """The smallest member of each one's set."""
        # All at once, a step a round; what is found is written back, so that paths stay short.
        found = self._parents[numbers]
        while True:
            above = self._parents[found]
            if np.array_equal(above, found):
                break
            found = above
        self._parents[numbers] = found
        return found

    def join(self, first: np.ndarray, second: np.ndarray) -> None:
        """Join the sets of every pair."""
        while len(first):
            first, second = self.roots(first), self.roots(second)
            apart = first != second
            low, high = np.minimum(first, second)[apart], np.maximum(first, second)[apart]
            # A root may be told to join several others: the smallest wins, and the rest try again.
            np.minimum.at(self._parents, high, low)
            first, second = low, high

"""Groups of documents in a corpus: equal texts, and near duplicates joined to groups by their pairs.

Memory is 17 bytes a document, plus the slice of keys that is sorted (``SLICE_DOCUMENTS``), plus the signatures of the
pairs that are compared at once. Everything else stays in the parts' files, in the system's page cache as far as it
fits.
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
    """Return for each document the first one with the same text, itself if there is no other: int64 [documents].

    Equal xxh3_128 and equal number of bytes count as the same text. (64 bits would not suffice: among ten billion
    documents two different texts would be expected to collide.)
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
    """Return for each document the smallest number in its group of near duplicates, int64 [documents].

    Groups are transitive. Two documents are joined if they share a band and their signatures agree in at least
    ``rule.similarity`` of their values, or if they are equal.
    """
    union = _Union(firsts.copy())
    # Copies are already joined: comparing them would only repeat the result of the first one.
    is_copy = firsts != np.arange(len(firsts))
    bands, _ = rule.bands()
    for band in range(bands):
        for documents, runs in corpus.runs(lambda part, band=band: part.bands[band], is_copy):
            for first, second in _pairs(documents, runs, union):
                alike = similarity(corpus.signatures(first), corpus.signatures(second)) >= rule.similarity
                union.join(first[alike], second[alike])
    return union.roots(np.arange(len(firsts)))


def _pairs(documents: np.ndarray, runs: np.ndarray, union: _Union) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of documents of the same run that are in different groups at that moment, in batches.

    Pair each run's first document with all others of its run, then its second with those after it, and so on. Most runs
    are a single group after the first round and cost no more.
    """
    leaders = np.flatnonzero(np.diff(runs, prepend=-1))
    stops = np.append(leaders[1:], len(runs))
    for _ in range(_MOST_LEADERS):
        waiting = stops - leaders > 1
        leaders, stops = leaders[waiting], stops[waiting]
        if not len(leaders):
            return
        others = stops - leaders - 1
        # Positions of all members after their leader.
        at = np.repeat(leaders + 1 - np.cumsum(others) + others, others) + np.arange(others.sum())
        of = np.repeat(leaders, others)
        for start in range(0, len(at), _PAIRS_AT_ONCE):
            first, second = documents[of[start : start + _PAIRS_AT_ONCE]], documents[at[start : start + _PAIRS_AT_ONCE]]
            apart = union.roots(first) != union.roots(second)
            if apart.any():
                yield first[apart], second[apart]
        # A run that is a single group is done.
        roots = union.roots(documents[at])
        joined = roots == np.repeat(union.roots(documents[leaders]), others)
        whole = np.logical_and.reduceat(joined, np.cumsum(others) - others)
        leaders, stops = leaders[~whole] + 1, stops[~whole]


class _Union:
    """Disjoint sets of numbers; each set is identified by its smallest member."""

    def __init__(self, parents: np.ndarray) -> None:
        self._parents = parents

    def roots(self, numbers: np.ndarray) -> np.ndarray:
        """Return the smallest member of each number's set."""
        # All numbers at once, one step per round; the results are written back to keep paths short.
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
            # A root may be joined to several others at once: the smallest wins, and the rest try again.
            np.minimum.at(self._parents, high, low)
            first, second = low, high

"""Document groups in a corpus: equal texts, and near duplicates joined into groups by their pairs.

Memory is 17 bytes per document, plus the slice of keys being sorted (``SLICE_DOCUMENTS``), plus the signatures of the
pairs being compared. All other data stays in the source parts' files, in the page cache as far as it fits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from data_pipeline.prepare.duplicates.duplicate_rule import DuplicateRule
from data_pipeline.prepare.duplicates.signatures import similarity
from data_pipeline.prepare.duplicates.signed import SignedCorpus

_PAIRS_AT_ONCE = 1 << 16
_MOST_LEADERS = 1024
"""Documents in a bucket (equal keys) that are compared with all later ones; the rest are only compared with these.

Without this limit, a million documents that share a licence text, but are not similar otherwise, would take a week.
"""


def find_copies(corpus: SignedCorpus) -> np.ndarray:
    """Return, for each document, the first one with the same text (itself if there is no earlier one): int64
    [documents].

    Texts are the same if both xxh3_128 and byte length are equal. (64 bits would not suffice: among ten billion
    documents, two different texts would be expected to collide.)
    """
    first_copies = np.arange(len(corpus))
    for documents, _ in corpus.runs(lambda part: part.document_rows["low"], np.zeros(len(corpus), dtype=bool)):
        rows = corpus.document_rows(documents)
        order = np.lexsort((documents, rows["text_bytes"], rows["high"], rows["low"]))
        documents, rows = documents[order], rows[order]
        is_first = np.ones(len(documents), dtype=bool)
        for name in ("low", "high", "text_bytes"):
            changes = rows[name][1:] != rows[name][:-1]
            is_first[1:] = changes if name == "low" else is_first[1:] | changes
        first_copies[documents] = documents[is_first][np.cumsum(is_first) - 1]
    return first_copies


def find_groups(corpus: SignedCorpus, first_copies: np.ndarray, rule: DuplicateRule) -> np.ndarray:
    """Return, for each document, the smallest number in its group of near duplicates, int64 [documents].

    Groups are transitive. Two documents are joined if they share a band and their signatures agree in at least
    ``rule.similarity`` of their values, or if their texts are equal.
    """
    union = _Union(first_copies.copy())
    # Copies are already joined, and comparing them would only repeat the first one's result.
    is_copy = first_copies != np.arange(len(first_copies))
    # Locality-sensitive hashing: only documents that share a complete band are compared (``rule.bands``), so the cost
    # follows the number of candidate pairs and not the square of the corpus size. Bands are processed one after the
    # other to keep a single band's keys in memory.
    bands, _ = rule.bands()
    for band in range(bands):
        for documents, runs in corpus.runs(lambda part, band=band: part.bands[band], is_copy):
            for first, second in _pairs(documents, runs, union):
                is_near = similarity(corpus.signatures(first), corpus.signatures(second)) >= rule.similarity
                union.join(first[is_near], second[is_near])
    return union.roots(np.arange(len(first_copies)))


def _pairs(documents: np.ndarray, runs: np.ndarray, union: _Union) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of documents in the same bucket (equal keys) that are still in different groups, in batches.

    Pairs each bucket's first document with all others in it, then the second with those after it, and so on. Most
    buckets are a single group after the first round and cost no more.
    """
    leaders = np.flatnonzero(np.diff(runs, prepend=-1))
    run_ends = np.append(leaders[1:], len(runs))
    for _ in range(_MOST_LEADERS):
        waiting = run_ends - leaders > 1
        leaders, run_ends = leaders[waiting], run_ends[waiting]
        if not len(leaders):
            return
        others = run_ends - leaders - 1
        # Positions of all members after their leader.
        at = np.repeat(leaders + 1 - np.cumsum(others) + others, others) + np.arange(others.sum())
        of = np.repeat(leaders, others)
        for start in range(0, len(at), _PAIRS_AT_ONCE):
            first, second = documents[of[start : start + _PAIRS_AT_ONCE]], documents[at[start : start + _PAIRS_AT_ONCE]]
            is_separate = union.roots(first) != union.roots(second)
            if is_separate.any():
                yield first[is_separate], second[is_separate]
        # Drop buckets that have become a single group.
        roots = union.roots(documents[at])
        joined = roots == np.repeat(union.roots(documents[leaders]), others)
        whole = np.logical_and.reduceat(joined, np.cumsum(others) - others)
        leaders, run_ends = leaders[~whole] + 1, run_ends[~whole]


# Union-find over arrays: each number points towards its set's smallest member. Invariant: a parent is never larger than
# its child, so there are no cycles, and joins only lower parents.
class _Union:
    """Disjoint sets of numbers; each set is identified by its smallest member."""

    def __init__(self, links: np.ndarray) -> None:
        self._links = links

    def roots(self, numbers: np.ndarray) -> np.ndarray:
        """Return the smallest member of each number's set."""
        # Follow one step per round for all numbers at once, and write the roots back to keep paths short.
        found = self._links[numbers]
        while True:
            above = self._links[found]
            if np.array_equal(above, found):
                break
            found = above
        self._links[numbers] = found
        return found

    def join(self, first: np.ndarray, second: np.ndarray) -> None:
        """Join the two sets of every pair."""
        while len(first):
            first, second = self.roots(first), self.roots(second)
            is_separate = first != second
            low, high = np.minimum(first, second)[is_separate], np.maximum(first, second)[is_separate]
            # A root may be joined to several others at once: the smallest wins, and the rest are retried.
            np.minimum.at(self._links, high, low)
            first, second = low, high

"""``degrees_of``: the context degree of each document of a micro-batch, and the imbalance of its attention. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from longctx.batch import PackedDocuments
from parallel.layout.sequence import SequenceLayout
from parallel.schedule.segments import cut_segments


@dataclass(frozen=True)
class Degrees:
    """Distribution of a micro-batch over its ranks."""

    ranks: tuple[int, ...]
    """Of each document that counts, the ranks that hold a part of it."""
    fewest: tuple[int, ...]
    """Of the same, the fewest that could hold it: its tokens over those of a rank, rounded up."""
    imbalance: float
    """Attention of the busiest rank over the mean."""


def degrees_of(layout: SequenceLayout, documents: PackedDocuments, *, causal: bool = True) -> Degrees:
    """Return the degrees of the documents that are neither empty nor padding. The work of padding counts."""
    starts = np.asarray(documents.bounds, dtype=np.int64)
    lengths = np.diff(starts)
    held = np.zeros((layout.ring_degree, len(starts) - 1), dtype=bool)
    work = np.zeros(layout.ring_degree, dtype=np.int64)
    for ring_rank, runs in enumerate(layout.runs):
        segments = cut_segments(runs, starts)
        held[ring_rank, segments.document] = True
        if causal:
            first = segments.start - starts[segments.document]
            work[ring_rank] = _keys_seen(first, segments.length, segments.step)
        else:
            work[ring_rank] = (segments.length * lengths[segments.document]).sum()
    ring_tokens = layout.num_ring(0)
    fewest = -(-lengths // ring_tokens)
    counts = lengths > 0
    counts[list(documents.padding or ())] = False
    some = np.flatnonzero(counts)
    return Degrees(
        # The ranks that split heads hold a document together.
        ranks=tuple((held.sum(0)[some] * layout.ulysses).tolist()),
        fewest=tuple((fewest[some] * layout.ulysses).tolist()),
        imbalance=float(work.max() * len(work) / work.sum()),
    )


def _keys_seen(first: ndarray, count: ndarray, step: int) -> int:
    """Count the keys that causal queries see: ``count`` tokens first, first + step, … of their document."""
    return int((count * (first + 1) + step * (count * (count - 1) // 2)).sum())

"""Context degree per document in a micro-batch, and attention imbalance. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from longctx.batch import PackedDocuments
from parallel.layout.sequence import SequenceLayout
from parallel.schedule.document_segments import cut_segments


@dataclass(frozen=True)
class Degrees:
    """How a micro-batch is distributed over ranks."""

    ranks: tuple[int, ...]
    """For each counted document, the number of ranks that hold a part."""
    min_ranks: tuple[int, ...]
    """For each counted document, the fewest ranks that could hold it: its tokens over a rank's tokens, rounded up."""
    imbalance: float
    """Attention work on the busiest rank over the mean."""


def degrees_of(layout: SequenceLayout, documents: PackedDocuments, *, causal: bool = True) -> Degrees:
    """Return the degrees for documents that are neither empty nor padding. Imbalance includes padding's work."""
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
    min_ranks = -(-lengths // ring_tokens)
    counts = lengths > 0
    counts[list(documents.padding or ())] = False
    some = np.flatnonzero(counts)
    return Degrees(
        # Ulysses ranks hold a document together, so each ring rank counts as ``ulysses`` ranks.
        ranks=tuple((held.sum(0)[some] * layout.ulysses).tolist()),
        min_ranks=tuple((min_ranks[some] * layout.ulysses).tolist()),
        imbalance=float(work.max() * len(work) / work.sum()),
    )


def _keys_seen(first: ndarray, count: ndarray, step: int) -> int:
    """Count the keys that causal queries see: ``count`` tokens first, first + step, … in their document."""
    return int((count * (first + 1) + step * (count * (count - 1) // 2)).sum())

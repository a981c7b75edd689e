"""The degree of each document and the work of each rank, counted token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.batch import PackedDocuments
from parallel.layout.sequence import KINDS, SequenceLayout
from parallel.schedule.degrees import degrees_of
from parallel.schedule.schedule import Schedule


def by_token(layout: SequenceLayout, bounds: list[int]) -> tuple[list[int], float]:
    """Ranks of each document, and the busiest ring rank's work over the mean."""
    found: list[set[int]] = [set() for _ in bounds[1:]]
    work = [0] * layout.ring_degree
    for rank in range(layout.degree):
        for token in layout.indices(rank).tolist():
            document = int(np.searchsorted(bounds, token, side="right")) - 1
            # Ranks that split heads hold the tokens of their ring rank between them.
            found[document] |= {rank // layout.ulysses}
            work[rank // layout.ulysses] += token - bounds[document] + 1
    ranks = [len(ranks) * layout.ulysses for ranks in found]
    return ranks, max(work) * len(work) / sum(work)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 5), st.integers(1, 2), st.integers(1, 30), st.data())
def test_counted_token_by_token(kind, ring, ulysses, share, data):
    degree = ring * ulysses
    tokens = 2 * degree * share
    ends = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=6)))
    bounds = [0, *ends, tokens]
    layout = SequenceLayout.build(kind, tokens, degree, bounds, ulysses)
    lengths = np.diff(bounds)
    padding = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    got = degrees_of(layout, PackedDocuments(tuple(bounds), tuple(sorted(padding))))
    lengths[list(padding)] = 0
    ranks, imbalance = by_token(layout, bounds)
    assert list(got.ranks) == [n for n, length in zip(ranks, lengths, strict=True) if length]
    assert list(got.fewest) == [-(-n // (tokens // ring)) * ulysses for n in lengths.tolist() if n]
    assert got.imbalance == pytest.approx(imbalance, rel=1e-12)
    assert got.imbalance == pytest.approx(Schedule.build(layout, bounds).imbalance(), rel=1e-12)
    assert all(few <= n for few, n in zip(got.fewest, got.ranks, strict=True))

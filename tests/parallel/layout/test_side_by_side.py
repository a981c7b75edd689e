"""Rows side by side: as many as it holds, equally many on each rank, whole grains where there is room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.layout.balanced import GRAIN, whole_grains
from parallel.layout.sequence import SequenceLayout
from parallel.layout.side_by_side import rows_at_once, tokens_on_ranks


@given(st.integers(1, 5000), st.integers(1, 16), st.integers(1, 4), st.integers(1, 9000))
def test_ranks_hold_equally_many_and_no_more_than_they_may(seq_len, ring, ulysses, tokens_per_rank):
    ranks = ring * ulysses
    rows = rows_at_once(seq_len, ranks, tokens_per_rank)
    assert rows * seq_len <= ranks * tokens_per_rank < (rows + 1) * seq_len
    if not rows:
        return
    tokens = tokens_on_ranks(rows * seq_len, ranks, ulysses=ulysses, tokens_per_rank=tokens_per_rank)
    each, rest = divmod(tokens, ranks)
    assert not rest
    assert each <= tokens_per_rank
    assert 0 <= tokens - rows * seq_len < ranks * (1 + GRAIN)
    # The least number of whole grains, or the least number where there is no room for them.
    least = -(-rows * seq_len // ranks)
    in_grains = [n for n in range(least, each + 1) if whole_grains(n * ulysses)]
    assert in_grains == [each] or (in_grains == [] and each == least)
    layout = SequenceLayout.build("balanced", tokens, ranks, [0, rows * seq_len, tokens], ulysses)
    assert {layout.num_local(rank) for rank in range(ranks)} == {each}


@pytest.mark.parametrize(
    ("tokens", "ranks", "ulysses", "most", "padded"),
    [
        (8192, 4, 1, 8192, 8192),
        (4096, 3, 1, 2048, 3 * 1368),  # 1366 is twice a prime; 1368 is 19 grains of 72
        (4096, 3, 1, 1366, 3 * 1366),  # no room for two more
        (4096, 6, 2, 2048, 6 * 684),  # two ranks hold the 1368 of a ring rank
        (7, 2, 1, 8, 8),
        (7, 1, 1, 8, 7),
    ],
)
def test_examples(tokens, ranks, ulysses, most, padded):
    assert tokens_on_ranks(tokens, ranks, ulysses=ulysses, tokens_per_rank=most) == padded

"""Schedules against the full mask they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.errors import ConfigError
from parallel.layout import KINDS, SequenceLayout
from parallel.schedule import AttentionShape, Schedule


def full_mask(cu_seqlens, causal):
    """[T, T]: which key a query sees, by definition."""
    document = torch.repeat_interleave(torch.tensor(cu_seqlens).diff())
    mask = document[:, None] == document
    return mask.tril() if causal else mask


def scheduled(schedule, rank):
    """(how often each of the rank's queries meets each global key, the global keys that travelled to it)."""
    layout = schedule.layout
    places = layout.split(torch.arange(layout.num_tokens), rank, 0)
    seen = torch.zeros(len(places), layout.num_tokens, dtype=torch.int64)
    travelled = []
    for hop, pairs in zip(schedule.hops(rank), schedule.pairs(rank), strict=True):
        theirs = layout.split(torch.arange(layout.num_tokens), hop.owner, 0)
        keys = torch.cat([theirs[a:b] for a, b in hop.rows]) if hop.rows else theirs[:0]
        travelled += keys.tolist() if hop.owner != rank else []
        for p in pairs:
            i, j = torch.arange(p.q_start, p.q_stop)[:, None], torch.arange(p.k_start, p.k_stop)
            inside = torch.ones(len(i), len(j), dtype=torch.int64) if p.lo is None else (i - j >= p.lo).long()
            seen[i, keys[j]] += inside
    return seen, places, travelled


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 5), st.integers(1, 6), st.booleans(), st.data())
def test_every_pair_of_the_mask_is_computed_once_and_nothing_else_travels(kind, degree, part, causal, data):
    tokens = 2 * degree * part
    cuts = data.draw(st.lists(st.integers(0, tokens), max_size=6))
    cu_seqlens = sorted([0, *cuts, tokens])
    schedule = Schedule.build(SequenceLayout.build(kind, tokens, degree), cu_seqlens, causal=causal)
    mask = full_mask(cu_seqlens, causal)
    for rank in range(degree):
        seen, places, travelled = scheduled(schedule, rank)
        assert torch.equal(seen, mask[places].long())
        assert schedule.work(rank) == int(mask[places].sum())
        needed = set(mask[places].any(0).nonzero().flatten().tolist()) - set(places.tolist())
        assert sorted(travelled) == sorted(needed), "each needed row once, and no other"
        assert schedule.rows_received(rank) == len(needed)


def test_zigzag_evens_out_one_long_document():
    even = Schedule.build(SequenceLayout.build("zigzag", 4096, 4))
    uneven = Schedule.build(SequenceLayout.build("contiguous", 4096, 4))
    assert even.imbalance() < 1.01
    assert uneven.imbalance() == pytest.approx(1.75, abs=0.01)


def test_figures_by_hand():
    schedule = Schedule.build(SequenceLayout.build("contiguous", 8, 2))
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, bytes_per_value=2)
    assert (schedule.work(0), schedule.work(1)) == (10, 26)
    assert schedule.flops(1, shape) == 4 * 4 * 16 * 26
    assert schedule.bytes_received(0, shape) == 0
    assert schedule.bytes_received(1, shape) == 4 * 2 * 2 * 16 * 2


@pytest.mark.parametrize("cu_seqlens", [[0, 4], [1, 8], [0, 5, 3, 8], [0, 9]])
def test_boundaries_that_are_not_the_row_s_are_refused(cu_seqlens):
    with pytest.raises(ConfigError, match="ascend from 0 to the sequence's 8 tokens"):
        Schedule.build(SequenceLayout.build("contiguous", 8, 2), cu_seqlens)


def test_what_is_not_built_says_so():
    layout = SequenceLayout.build("contiguous", 8, 2)
    with pytest.raises(ConfigError, match="not built yet"):
        Schedule.build(layout, window=4)
    with pytest.raises(ConfigError, match="not built yet"):
        Schedule.build(layout).bytes_received(0, AttentionShape(1, 1, 2, 2), "all_gather")

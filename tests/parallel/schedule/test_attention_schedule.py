"""Schedules against the full mask they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.batch import PackedDocuments
from longctx.errors import ConfigError
from longctx.kernels.attention.slices import table_slices
from parallel.layout.sequence import KINDS, SequenceLayout
from parallel.schedule.attention_schedule import Schedule
from parallel.schedule.degrees import degrees_of
from parallel.schedule.document_segments import shared_documents
from parallel.schedule.head_split import AttentionShape
from parallel.schedule.row_ranges import RowRanges
from tests.helpers import lines_run


def full_mask(cu_seqlens, causal=True, window=None, sink_tokens=0, stride=0):
    """[T, T]: which key a query sees, by definition."""
    lengths = torch.tensor(cu_seqlens).diff()
    document = torch.repeat_interleave(lengths)
    place = torch.arange(len(document)) - torch.tensor(cu_seqlens)[document]
    distance = place[:, None] - place
    mask = document[:, None] == document
    if causal:
        mask &= distance >= 0
    if window is not None:
        strided = distance % stride == 0 if stride else torch.zeros_like(mask)
        mask &= (distance.abs() < window) | (place < sink_tokens) | strided
    return mask


def scheduled(schedule, rank, check_distances=False):
    """(how often each query of the rank's ring index meets each global key, the global keys that travelled to it)."""
    layout, keys_of, ring_index = schedule.layout, schedule.key_layout, rank // schedule.layout.ulysses
    places = torch.cat([torch.arange(s, s + n * d, d) for s, n, d in layout.runs[ring_index]])
    seen = torch.zeros(len(places), layout.num_tokens, dtype=torch.int64)
    travelled = []
    for hop, pairs in zip(schedule.hops(rank), schedule.pairs(rank), strict=True):
        theirs = torch.cat([torch.arange(s, s + n * d, d) for s, n, d in keys_of.runs[hop.owner]])
        keys = torch.cat([theirs[a:b] for a, b in hop.rows]) if hop.rows else theirs[:0]
        travelled += keys.tolist() if hop.owner != ring_index else []
        # A stride's rows are gathered first, each once.
        gathered = [
            (torch.arange(*hop.queries)[w.query_rows], w.key_rows, table_slices(w.slices)) for w in hop.work[1:]
        ]
        assert all(len(rows.unique()) == len(rows) for *both, _ in gathered for rows in both)
        for query_rows, key_rows, slices in [(slice(None), slice(None), pairs), *gathered]:
            rows, columns = torch.arange(len(places))[query_rows], keys[key_rows]
            for p in slices:
                i, j = torch.arange(p.q_start, p.q_stop)[:, None], torch.arange(p.k_start, p.k_stop)
                inside = torch.ones(i.shape[0], j.shape[0], dtype=torch.bool)
                inside &= (i - j >= p.lo) if p.lo is not None else inside
                inside &= (i - j <= p.hi) if p.hi is not None else inside
                assert inside.any(1).all(), "a row that sees nothing was not trimmed"
                assert inside.any(0).all(), "a key that nobody sees was not trimmed"
                assert hop.queries[0] <= rows[i].min() <= rows[i].max() < hop.queries[1]
                seen[rows[i], columns[j]] += inside.long()
                if check_distances or slices is not pairs:
                    distance = places[rows[i]] - columns[j]
                    assert torch.equal((p.step * (i - j) + p.offset)[inside], distance[inside])
    return seen, places, travelled


@st.composite
def cases(draw, strides=False):
    kind, ring, ulysses = draw(st.sampled_from(KINDS)), draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 2]))
    tokens = 2 * ring * ulysses * draw(st.integers(1, 6))
    cuts = draw(st.lists(st.integers(0, tokens), max_size=6))
    cu_seqlens = sorted([0, *cuts, tokens])
    layout = SequenceLayout.build(kind, tokens, ring * ulysses, cu_seqlens, ulysses)
    if strides:
        window, stride = (draw(st.integers(1, 9) | st.integers(1, tokens + 2)) for _ in range(2))
        return layout, {"cu_seqlens": cu_seqlens, "window": window, "stride": stride}
    window = draw(st.none() | st.integers(1, tokens + 2))
    sinks = 0 if window is None else draw(st.integers(0, 4))
    return layout, {"cu_seqlens": cu_seqlens, "causal": draw(st.booleans()), "window": window, "sink_tokens": sinks}


@settings(max_examples=250, deadline=None)
@given(cases() | cases(strides=True), st.booleans(), st.integers(1, 3))
def test_every_pair_of_the_mask_is_computed_once_and_nothing_else_travels(case, distances, node_size):
    layout, mask_words = case
    schedule = Schedule.build(layout, **mask_words)
    schedule = schedule.with_relative_positions() if distances else schedule
    mask, shape = full_mask(**mask_words), AttentionShape(1, 1, 1, 1)
    for rank in range(0, layout.degree, layout.ulysses):
        seen, places, travelled = scheduled(schedule, rank, check_distances=distances)
        assert torch.equal(seen, mask[places].long())
        assert schedule.work(rank) == int(mask[places].sum())
        needed = set(mask[places].any(0).nonzero().flatten().tolist()) - set(places.tolist())
        assert sorted(travelled) == sorted(needed)
        assert schedule.rows_received(rank) == len(needed)
        if layout.ulysses == 1:
            assert schedule.bytes_received(rank, shape) == 2 * len(needed)
            if layout.ring_degree % node_size == 0:
                assert schedule.bytes_received(rank, shape, "two_level", node_size) >= 2 * len(needed)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_hops_that_are_left_out_send_and_receive_nothing(case):
    layout, mask_words = case
    schedule, whole = Schedule.build(layout, **mask_words), Schedule.build(layout, **mask_words)
    ring = layout.ring_degree
    for rank in range(ring):
        # Asked first, so that the hops are then built from what is known of partners.
        exchanges = schedule.partners(rank).hops
        busy = [
            h
            for h in range(1, ring)
            if whole.hop(rank, (rank - h) % ring).rows or whole.rows_needed((rank + h) % ring, rank)
        ]
        assert set(busy) <= set(exchanges) <= set(range(1, ring))
        # Sinks may be asked for in vain, striped layouts do not say, all others say exactly.
        if not mask_words["sink_tokens"] and layout.kind != "striped":
            assert exchanges == busy
        for h in range(ring):
            assert schedule.hop(rank, (rank - h) % ring).rows == whole.hop(rank, (rank - h) % ring).rows
            assert schedule.rows_needed((rank + h) % ring, rank) == whole.rows_needed((rank + h) % ring, rank)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_shared_documents_are_those_on_several_ranks(case):
    layout, mask_words = case
    bounds = np.array(mask_words["cu_seqlens"])
    holders: dict[int, set[int]] = {}
    for rank in range(layout.degree):
        for token in layout.indices(rank).tolist():
            holders.setdefault(int(np.searchsorted(bounds, token, side="right")) - 1, set()).add(rank)
    wanted = sorted(document for document, ranks in holders.items() if len(ranks) > 1)
    assert shared_documents(layout, mask_words["cu_seqlens"]).tolist() == wanted


def test_ranks_of_many_documents_meet_few_others():
    """What a rank does follows from its own documents, however many ranks there are."""
    documents = list(range(0, 512 * 256 + 1, 384))
    met = {}
    for degree in (16, 128, 512):
        bounds = [bound for bound in documents if bound < degree * 256]
        schedule = Schedule.build(
            SequenceLayout.build("contiguous", degree * 256, degree, [*bounds, degree * 256]), [*bounds, degree * 256]
        )
        exchanges = schedule.partners(degree // 2).hops
        met[degree] = len(exchanges)
        before = len(schedule._built)
        for hop in exchanges:
            schedule.hop(degree // 2, (degree // 2 - hop) % degree)
            schedule.rows_needed((degree // 2 + hop) % degree, degree // 2)
        assert len(schedule._built) - before <= 4 * len(exchanges)
    assert max(met.values()) <= 2


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from(KINDS))
def test_keys_may_live_in_a_layout_of_their_own(case, kind):
    layout, mask_words = case
    keys = SequenceLayout.build(kind, layout.num_tokens, layout.degree, mask_words["cu_seqlens"], layout.ulysses)
    schedule = Schedule.build(layout, **mask_words, key_layout=keys)
    mask = full_mask(**mask_words)
    for rank in range(0, layout.degree, layout.ulysses):
        seen, places, _ = scheduled(schedule, rank, check_distances=True)
        assert torch.equal(seen, mask[places].long())


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 3))
def test_a_row_crosses_to_a_node_once(case, places):
    layout, mask_words = case
    ring = layout.ring_degree
    if ring % places:
        places = 1
    schedule = Schedule.build(layout, **mask_words)
    for node in range(ring // places):
        mates = range(node * places, (node + 1) * places)
        crossed = 0
        for owner in set(range(ring)) - set(mates):
            needed = set()
            for receiver in mates:
                rows = schedule.hop(receiver, owner).rows
                needed |= {n for a, b in rows for n in range(a, b)}
                if rows:
                    block = schedule.rows_to_node(owner, mates)
                    packed = [n for a, b in block for n in range(a, b)]
                    assert [packed[n] for a, b in rows.positions_in(block) for n in range(a, b)] == [
                        n for a, b in rows for n in range(a, b)
                    ]
            crossed += len(needed)
        assert sum(schedule.rows_by_link(x, places)[1] for x in mates) == crossed


def test_zigzag_evens_out_causal_work():
    contiguous, zigzag, striped, balanced = (
        Schedule.build(SequenceLayout.build(kind, 4096, 8)).imbalance()
        for kind in ("contiguous", "zigzag", "striped", "balanced")
    )
    assert zigzag == 1.0
    assert balanced <= 1.02
    assert striped < 1.01
    assert contiguous > 1.8


def test_hops_stop_where_the_window_ends():
    layout = SequenceLayout.build("contiguous", 64 * 8, 8)
    schedule = Schedule.build(layout, window=65)  # a share and one more: the rank before, and no other
    assert [hop.num_rows for hop in schedule.hops(5)] == [64, 64, 0, 0, 0, 0, 0, 0]
    assert [hop.num_rows for hop in Schedule.build(layout, window=64).hops(5)][1:3] == [63, 0]
    with_sinks = Schedule.build(layout, window=64, sink_tokens=4)
    assert [hop.num_rows for hop in with_sinks.hops(5)] == [64, 63, 0, 0, 0, 4, 0, 0]


def test_flops_and_bytes_by_hand():
    """8 tokens on 2 ranks, contiguous, one document: rank 1 sees rank 0's 4 rows in full, and 10 pairs of its own."""
    schedule = Schedule.build(SequenceLayout.build("contiguous", 8, 2))
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, bytes_per_value=2)
    assert (schedule.work(0), schedule.work(1)) == (10, 26)
    assert schedule.flops(1, shape) == 4 * 4 * 16 * 26
    assert schedule.bytes_received(0, shape) == 0
    assert schedule.bytes_received(1, shape) == 4 * 2 * 2 * 16 * 2
    assert schedule.bytes_received(0, shape, "all_gather") == 4 * 2 * 2 * 16 * 2
    latent = shape._replace(head_dim=24, value_dim=16)
    assert schedule.flops(1, latent) == 2 * 4 * 40 * 26


def test_bytes_of_traded_heads_by_hand():
    """8 tokens on 2 ranks that split 4 heads: each gets 2 heads of 4 rows of q, one of k and v, and 2 heads of out."""
    schedule = Schedule.build(SequenceLayout.build("contiguous", 8, 2, ulysses=2))
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, bytes_per_value=2)
    assert schedule.bytes_received(0, shape) == 4 * (2 + 1 + 1 + 2) * 16 * 2
    assert schedule.flops(0, shape) == 4 * 2 * 16 * 36
    one_key_head = shape._replace(num_kv_heads=1)  # both ranks need it
    assert schedule.bytes_received(0, one_key_head) == 4 * (2 + 1 + 1 + 2) * 16 * 2


@pytest.mark.parametrize("cu_seqlens", [[0, 4], [1, 8], [0, 5, 3, 8], [0, 9]])
def test_boundaries_that_are_not_the_row_s_are_refused(cu_seqlens):
    with pytest.raises(ConfigError, match="ascend from 0 to the sequence's 8 tokens"):
        Schedule.build(SequenceLayout.build("contiguous", 8, 2), cu_seqlens)


@pytest.mark.parametrize(("words", "said"), [({"window": 0}, "at least 1"), ({"sink_tokens": 4}, "give a window")])
def test_masks_that_make_no_sense_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        Schedule.build(SequenceLayout.build("contiguous", 8, 2), **words)


def test_a_stride_that_the_ring_divides_sends_nothing_in_striped_layouts():
    layout = SequenceLayout.build("striped", 240, 4)
    for stride, least, most in ((12, 0, 0), (10, 50, 60), (7, 150, 180)):  # classes on one rank, on two, on all four
        for rank in range(4):
            assert least <= Schedule.build(layout, window=1, stride=stride).rows_received(rank) <= most


def test_strides_that_make_no_sense_are_refused():
    layout = SequenceLayout.build("contiguous", 8, 2)
    for stride, window, sink_tokens in [(-1, None, 0), (2, None, 0), (2, 2, 1)]:
        with pytest.raises(ConfigError, match="needs a window and no sink tokens"):
            Schedule.build(layout, window=window, sink_tokens=sink_tokens, stride=stride)
    keys = SequenceLayout.build("striped", 8, 2)
    with pytest.raises(ConfigError, match="in one layout"):
        Schedule.build(layout, window=2, stride=3, key_layout=keys)
    assert Schedule.build(layout, window=2, stride=3).digest != Schedule.build(layout, window=2).digest


def test_layouts_of_different_sizes_are_refused():
    with pytest.raises(ConfigError, match="both must match"):
        Schedule.build(SequenceLayout.build("zigzag", 8, 2), key_layout=SequenceLayout.build("zigzag", 16, 2))


def test_unions_are_ascending_and_disjoint():
    parts = [RowRanges(np.array([start]), np.array([stop])) for start, stop in ((5, 7), (0, 2), (2, 3), (6, 9))]
    assert list(RowRanges.union(parts)) == [(0, 3), (5, 9)]
    assert RowRanges.union(parts).num_rows == 7
    assert RowRanges.union(parts).index(torch.device("cpu")).tolist() == [0, 1, 2, 5, 6, 7, 8]


# Striped rows break every document up over all ranks: 114,000 slices, where the others have some dozens.
@pytest.mark.parametrize("kind", KINDS)
def test_of_a_million_tokens_no_loop_goes_over_tokens(kind):
    """One rank's share of 2,000 documents at degree 64: what it receives and what it sends."""
    tokens = 1 << 20
    g = torch.Generator().manual_seed(0)
    cuts = torch.randint(tokens, (1999,), generator=g).sort().values.tolist()
    layout = SequenceLayout.build(kind, tokens, 64, [0, *cuts, tokens])

    def build() -> None:
        schedule = Schedule.build(layout, [0, *cuts, tokens])
        for other in range(64):
            schedule.hop(17, other)
            schedule.rows_needed(other, 17)
        assert len(schedule.digest) == 32

    # 31,000 to 69,000 by kind, of eight times as many tokens too.
    assert lines_run(build) < tokens // 10


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
def test_degrees_and_work_counted_token_by_token(kind, ring, ulysses, share, data):
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
    assert list(got.min_ranks) == [-(-n // (tokens // ring)) * ulysses for n in lengths.tolist() if n]
    assert got.imbalance == pytest.approx(imbalance, rel=1e-12)
    assert got.imbalance == pytest.approx(Schedule.build(layout, bounds).imbalance(), rel=1e-12)
    assert all(few <= n for few, n in zip(got.min_ranks, got.ranks, strict=True))

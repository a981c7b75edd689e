"""Layouts by example and by property."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.errors import ConfigError
from parallel.layout.sequence import KINDS, SequenceLayout, TokenRun


def runs(kind, tokens, degree, ulysses=1):
    return [[tuple(r) for r in mine] for mine in SequenceLayout.build(kind, tokens, degree, ulysses=ulysses).runs]


def test_layouts_by_example():
    assert runs("contiguous", 12, 3) == [[(0, 4, 1)], [(4, 4, 1)], [(8, 4, 1)]]
    assert runs("zigzag", 12, 3) == [[(0, 2, 1), (10, 2, 1)], [(2, 2, 1), (8, 2, 1)], [(4, 4, 1)]]
    assert runs("striped", 12, 3) == [[(0, 4, 3)], [(1, 4, 3)], [(2, 4, 3)]]
    assert runs("striped", 4, 1) == runs("zigzag", 4, 1) == runs("balanced", 4, 1) == [[(0, 4, 1)]]


def test_ulysses_ranks_share_the_rows_of_a_ring_rank():
    layout = SequenceLayout.build("zigzag", 24, 6, ulysses=3)
    assert layout.ring_degree == 2
    assert layout.runs == SequenceLayout.build("zigzag", 24, 2).runs
    assert layout.rank_runs(1) == (TokenRun(4, 2, 1), TokenRun(18, 2, 1)), "a part may begin and end within runs"
    assert [layout.indices(r).tolist() for r in range(3)] == [[0, 1, 2, 3], [4, 5, 18, 19], [20, 21, 22, 23]]
    assert (layout.num_ring(0), layout.num_local(0)) == (12, 4)
    striped = SequenceLayout.build("striped", 24, 6, ulysses=3)
    assert striped.indices(4).tolist() == [9, 11, 13, 15]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 7), st.integers(1, 4), st.integers(1, 40), st.integers(-2, 1), st.data())
def test_every_layout_is_a_permutation_that_join_inverts(kind, ring, ulysses, part, dim, data):
    tokens = (math.lcm(2, ulysses) if kind == "zigzag" else ulysses) * ring * part
    cuts = data.draw(st.lists(st.integers(0, tokens), max_size=6))
    cu_seqlens = torch.tensor(sorted([0, *cuts, tokens]), dtype=torch.int32)
    layout = SequenceLayout.build(kind, tokens, ring * ulysses, cu_seqlens, ulysses)
    ranks = range(ring * ulysses)
    shape = (tokens, 3) if dim in (0, -2) else (3, tokens)
    x = torch.arange(tokens * 3).view(shape)
    parts = [layout.split(x, rank, dim) for rank in ranks]
    assert {p.shape[dim] for p in parts} == {layout.num_local(r) for r in ranks} == {tokens // len(ranks)}
    assert torch.equal(layout.join(parts, dim), x)
    places = [layout.indices(rank) for rank in ranks]
    assert sorted(torch.cat(places).tolist()) == list(range(tokens))
    for rank in ranks:
        assert places[rank].dtype == torch.int64
        assert torch.equal(parts[rank], x.index_select(dim, places[rank]))
    for ring_rank in range(ring):
        rows = torch.cat(places[ring_rank * ulysses : (ring_rank + 1) * ulysses])
        assert (rows.diff() > 0).all(), "local order is global order"
        assert layout.num_ring(ring_rank) == len(rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("zigzag", 1000, 3), "Try 996 or 1002"),
        (("contiguous", 2, 3), "Try 3 tokens"),
        (("striped", 13, 2), "Try 12 or 14"),
        (("balanced", 13, 2), "Try 12 or 14"),
        (("spiral", 12, 2), "contiguous"),
        (("zigzag", 12, 2, None, 3), "Try parallel.ulysses=2"),
        (("zigzag", 12, 2, None, 0), "Try parallel.ulysses=1"),
        (("contiguous", 13, 4, None, 2), "Try 12 or 16"),
        (("zigzag", 36, 6, None, 3), None),
        (("zigzag", 30, 6, None, 3), "Try 24 or 36"),
        (("zigzag", 0, 2), "needs tokens"),
        (("balanced", 12, 2, [0, 5, 4, 12]), "cu_seqlens must ascend"),
        (("balanced", 12, 2, [0, 5, 11]), "the sequence's 12 tokens"),
        (("balanced", 12, 2, []), "cu_seqlens must ascend"),
    ],
)
def test_what_cannot_be_split_is_refused(arguments, said):
    if said is None:
        SequenceLayout.build(*arguments)
        return
    with pytest.raises(ConfigError, match=said):
        SequenceLayout.build(*arguments)


def test_a_tensor_of_another_length_is_refused():
    with pytest.raises(ValueError, match="flatten the batch rows"):
        SequenceLayout.build("zigzag", 12, 3).split(torch.zeros(2, 6), 0, 1)

"""Placements by example, from layouts, and what is wrong with the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longctx.errors import ConfigError
from parallel.layout.sequence import KINDS, SequenceLayout
from parallel.layout.token_placement import TokenPlacement


def test_a_placement_by_example():
    placement = TokenPlacement.build([[5, 0, 3], [], torch.tensor([[4], [1]]), np.array([2], dtype=np.int32)], 6)
    assert (placement.num_tokens, placement.degree) == (6, 4)
    assert [placement.tokens(rank).tolist() for rank in range(4)] == [[5, 0, 3], [], [4, 1], [2]]
    assert [placement.num_local(rank) for rank in range(4)] == [3, 0, 2, 1]
    assert placement.token_ranks.tolist() == [0, 2, 3, 0, 2, 0]
    assert placement.token_rows.tolist() == [1, 1, 0, 2, 0, 0]
    assert placement.describe() == "6 tokens over 4 ranks (0 to 3 each)"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("degree", "ulysses"), [(1, 1), (3, 1), (4, 2), (6, 3)])
def test_a_layout_is_a_placement(kind: str, degree: int, ulysses: int):
    layout = SequenceLayout.build(kind, 72, degree, [0, 5, 50, 72], ulysses)
    placement = TokenPlacement.of_layout(layout)
    assert placement.degree == degree
    for rank in range(degree):
        assert placement.tokens(rank).tolist() == layout.indices(rank).tolist()
    assert TokenPlacement.of_layout(layout) is placement
    assert TokenPlacement.build([layout.indices(rank) for rank in range(degree)], 72) == placement


def test_equal_placements_are_one_key_and_others_are_not():
    same = [TokenPlacement.build([[1, 0], [2]], 3) for _ in range(2)]
    others = [
        TokenPlacement.build(ranks, 3) for ranks in ([[0, 1], [2]], [[1], [0, 2]], [[1, 0, 2]], [[1, 0], [], [2]])
    ]
    assert same[0] == same[1]
    assert len({*same, *others}) == 5
    assert same[0] != "a placement"


def test_it_keeps_its_tokens_when_the_caller_changes_his():
    mine = np.array([1, 0])
    placement = TokenPlacement.build([mine], 2)
    mine[0] = 7
    assert placement.tokens(0).tolist() == [1, 0]
    with pytest.raises(ValueError, match="read-only"):
        placement.tokens(0)[0] = 1


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([[0, 1], [3]], "token 2 is on no rank"),
        ([[0], [], [1, 2]], "token 3 is on no rank.*\nAdd it"),
        ([[0, 1, 2], [], [3, 1]], "token 1 is listed 2 times, on ranks 0, 2.*3 ranks has each token from 0 to 3"),
        ([[0, 1, 2, 2, 3]], "token 2 is listed 2 times, on ranks 0, 0.*\nKeep it once"),
        ([[3, 3], [1, 0]], "token 2 is on no rank"),  # the first of two faults
        ([[0, 1], [], [4, 2, 3]], "rank 2 has token 4"),
        ([[0, 1], [-1, 2, 3]], "rank 1 has token -1"),
        ([[0, 1], [2.0, 3.0]], "rank 1 are float64"),
        ([], "needs ranks"),
    ],
)
def test_what_is_no_placement_is_refused(ranks: list[list[int]], said: str):
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        TokenPlacement.build(ranks, 4)


def test_a_sequence_may_be_empty():
    assert TokenPlacement.build([[], []], 0).num_tokens == 0

"""Relayouts without a process: every rank's messages together are the permutation, and nothing else moves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.layout.sequence import KINDS, SequenceLayout
from parallel.layout.token_placement import TokenPlacement
from parallel.schedule.relayout_plan import RelayoutPlan, RowMoves, plan_relayout


def moved_by_messages(plan: RelayoutPlan) -> list[np.ndarray]:
    """Every rank's tokens after the exchange; −1 at a row that nothing was written to."""
    source, target = plan.source, plan.target
    moves = [plan.moves(rank) for rank in range(source.degree)]
    messages = {}
    for rank, mine in enumerate(moves):
        parts = np.split(source.tokens(rank)[mine.sent], np.cumsum(mine.send_counts)[:-1])
        messages |= {(rank, receiver): part for receiver, part in enumerate(parts)}
    result = []
    for rank, mine in enumerate(moves):
        rows = np.full(target.num_local(rank), -1)
        rows[mine.kept_to] = source.tokens(rank)[mine.kept_from]
        arrived = [messages[sender, rank] for sender in range(source.degree)]
        assert [len(part) for part in arrived] == list(mine.receive_counts)
        rows[mine.received] = np.concatenate(arrived)
        result.append(rows)
    return result


def rows_touched(moves: RowMoves) -> tuple[list[int], list[int]]:
    """Source rows that are read and target rows that are written, sorted."""
    return sorted([*moves.sent, *moves.kept_from]), sorted([*moves.received, *moves.kept_to])


def changes(plan: RelayoutPlan) -> dict[int, tuple[int, int]]:
    """Each token that changes its rank, and both ranks, token by token."""
    ranks = [
        {int(token): rank for rank in range(x.degree) for token in x.tokens(rank)} for x in (plan.source, plan.target)
    ]
    return {token: (ranks[0][token], ranks[1][token]) for token in ranks[0] if ranks[0][token] != ranks[1][token]}


def check(plan: RelayoutPlan) -> None:
    """All that must hold for a plan."""
    expected = changes(plan)
    assert plan.num_moved == len(expected)
    for rank, rows in enumerate(moved_by_messages(plan)):
        assert rows.tolist() == plan.target.tokens(rank).tolist()
        moves = plan.moves(rank)
        read, written = rows_touched(moves)
        assert read == list(range(plan.source.num_local(rank))), "each row once"
        assert written == list(range(plan.target.num_local(rank)))
        assert moves.send_counts[rank] == moves.receive_counts[rank] == 0
        assert {int(token) for token in plan.source.tokens(rank)[moves.sent]} == {
            token for token, (sender, _) in expected.items() if sender == rank
        }
        assert plan.rows_sent(rank) == sum(moves.send_counts) == len(moves.sent)
        assert plan.rows_received(rank) == sum(moves.receive_counts) == len(moves.received)


@st.composite
def placements(draw, degree: int, num_tokens: int) -> TokenPlacement:
    tokens = draw(st.permutations(range(num_tokens)))
    cuts = sorted(draw(st.lists(st.integers(0, num_tokens), min_size=degree - 1, max_size=degree - 1)))
    bounds = [0, *cuts, num_tokens]
    return TokenPlacement.build([tokens[a:b] for a, b in itertools.pairwise(bounds)], num_tokens)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.integers(0, 24), st.data())
def test_any_two_placements(degree: int, num_tokens: int, data: st.DataObject):
    source, target = (data.draw(placements(degree, num_tokens)) for _ in range(2))
    plan = plan_relayout(source, target)
    check(plan)
    check(plan.inverse)
    assert [plan.inverse.rows_sent(rank) for rank in range(degree)] == [
        plan.rows_received(rank) for rank in range(degree)
    ]


@pytest.mark.parametrize(("degree", "ulysses"), [(1, 1), (3, 1), (4, 2)])
def test_any_two_layouts(degree: int, ulysses: int):
    layouts = [SequenceLayout.build(kind, 48, degree, [0, 7, 40, 48], ulysses) for kind in KINDS]
    for source, target in itertools.product(map(TokenPlacement.of_layout, layouts), repeat=2):
        check(plan_relayout(source, target))


def test_messages_by_example():
    source = TokenPlacement.build([[0, 1, 2, 3], [4, 5, 6, 7], []], 8)
    target = TokenPlacement.build([[5, 1, 4], [], [7, 0, 6, 2, 3]], 8)
    moves = plan_relayout(source, target).moves(0)
    assert moves.sent.tolist() == [0, 2, 3]
    assert (moves.send_counts, moves.receive_counts) == ((0, 0, 3), (0, 2, 0))
    assert moves.received.tolist() == [2, 0], "in the sender's order: tokens 4 and 5"
    assert (moves.kept_from.tolist(), moves.kept_to.tolist()) == ([1], [1])


def test_what_stays_is_not_sent_and_equal_pairs_share_a_plan():
    halves = [TokenPlacement.build([[0, 1, 2], [3, 4]], 5) for _ in range(2)]
    mixed = TokenPlacement.build([[2, 0, 1], [4, 3]], 5)
    assert plan_relayout(halves[0], mixed).num_moved == 0
    assert not len(plan_relayout(halves[0], mixed).moves(0).sent)
    assert plan_relayout(halves[0], mixed) is plan_relayout(halves[1], mixed)
    assert plan_relayout(mixed, halves[0]).digest != plan_relayout(halves[0], mixed).digest
    assert plan_relayout(halves[0], mixed).inverse.inverse is plan_relayout(halves[0], mixed)


@pytest.mark.parametrize("other", [TokenPlacement.build([[0, 1], [2]], 3), TokenPlacement.build([[0, 1, 2, 3]], 4)])
def test_placements_of_different_sequences_have_no_plan(other: TokenPlacement):
    plan = plan_relayout(TokenPlacement.build([[0, 1], [2, 3]], 4), other)
    assert plan.problem is not None
    assert "4 tokens over 2 ranks (2 to 2 each)" in plan.problem
    with pytest.raises(AssertionError, match="need the same tokens and ranks"):
        plan.moves(0)

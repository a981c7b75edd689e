"""A ring's floor has the work of its schedule, and the bounds of a ring's times follow the kind of processor."""

from __future__ import annotations

import pytest

from benchmarks import attention, blocks
from benchmarks.methods import BF16, FP32, RING, Timed, _timed_row, problem
from longctx.kernels.attention.select import choose_kernel
from longctx.kernels.attention.slices import table_slices
from parallel.layout.sequence import SequenceLayout
from parallel.schedule.schedule import Schedule

BOUNDS = (0, 7, 40, 64)


class Counting:
    """A kernel that counts the query-key pairs of its forward and its backward calls."""

    def __init__(self, kernel):
        self.kernel, self.pairs = kernel, [0, 0]

    def forward(self, *given, scores):
        self.pairs[0] += _pairs(given[-1])
        return self.kernel.forward(*given, scores=scores)

    def backward(self, *given, scores):
        self.pairs[1] += _pairs(given[-1])
        return self.kernel.backward(*given, scores=scores)


def _pairs(table) -> int:
    found = 0
    for part in table_slices(table):
        for i in range(part.q_start, part.q_stop):
            found += sum(part.lo is None or i - j >= part.lo for j in range(part.k_start, part.k_stop))
    return found


@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
def test_blocks_are_the_ranks_whole_work(layout, monkeypatch):
    schedule = Schedule.build(SequenceLayout.build(layout, 64, 2, BOUNDS), BOUNDS)
    whole = problem(BF16, *BOUNDS).inputs()
    for rank in range(2):
        kernels = []

        def counting(name, request, kernels=kernels):
            kernels.append(Counting(choose_kernel(name, request)))
            return kernels[0]

        monkeypatch.setattr(blocks, "choose_kernel", counting)
        run = blocks.blocks_alone(schedule, rank, whole)
        kernels[0].pairs = [0, 0]
        run()
        assert kernels[0].pairs == [schedule.work(rank)] * 2


def test_a_row_holds_each_rank_against_its_own_work():
    ranks = [Timed(2.0, [1.1], {"zigzag": 1.0}), Timed(4.0, [2.1], {"zigzag": 1.5})]
    row = _timed_row(problem(BF16, 0, 64), RING, 0, ranks)
    assert row["ratio_to_share"] == 1.1
    assert row["ratio_to_blocks"] == 1.4
    assert row["blocks_ratio_to_share"] == 1.0


@pytest.mark.parametrize("native", [False, True])
def test_time_bounds_follow_the_kind(native, monkeypatch):
    monkeypatch.setattr(attention, "has_native_bfloat16", lambda: native)
    row = {"ratio_to_share": 1.15, "ratio_to_blocks": 1.04, "blocks_ratio_to_share": 1.08}
    [whole] = attention.time_bounds("ring", row | {"case": FP32})
    assert (whole.limit, whole.held) == (attention.TIME_BOUND, False)
    found = list(attention.time_bounds("ring", row | {"case": BF16}))
    if native:
        assert [bound.limit for bound in found] == [attention.NATIVE_RING_BOUND, 1.1]
        assert all(bound.held for bound in found)
    else:
        assert [bound.limit for bound in found] == [round(0.6 * attention.TIME_BOUND, 3)]
    *_, busiest = attention.time_bounds("packed", row | {"case": BF16}, 1.2, 1.15)
    assert busiest.limit == pytest.approx(1.38 * 1.1 / attention.TIME_BOUND if native else 0.6 * 1.38, abs=1e-3)
    assert "1.200" in busiest.why

"""A ring's floor has the work of its schedule, and the bounds of a ring's times follow the kind of processor."""

from __future__ import annotations

import pytest

from benchmarks import blocks
from benchmarks.methods import BF16, problem
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

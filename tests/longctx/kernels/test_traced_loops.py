"""Loops of which a trace runs a few steps: operators and memory are those of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.trace.live_bytes import LiveBytes
from longctx.kernels import traced_loops
from longctx.kernels.gated_delta.gated_delta_call import GatedDeltaOptions
from longctx.kernels.gated_delta.gated_delta_rule import gated_delta
from longctx.kernels.linear_attention import StateSegments
from longctx.kernels.traced_loops import in_a_trace_once, times
from tests.longctx.kernels.delta_oracle import make


class Counting(TorchDispatchMode):
    """Operators and live bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.live = LiveBytes("cpu")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operators[func.name()] += times()
        self.live.see(func.name(), out)
        return out


def traced(bounds: Sequence[int]) -> tuple[Counter[str], int]:
    """What forward and backward of a layer do on tensors without data."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tokens, weights = (type(x)(*map(mode.from_tensor, x)) for x in make(bounds[-1]))
    with mode, Counting() as counting:
        out, _ = gated_delta(
            tokens, weights, GatedDeltaOptions(segments=StateSegments(bounds), chunk=4, block_chunks=2)
        )
        torch.autograd.grad(out, (*tokens, *weights), torch.ones_like(out))
    return counting.operators, counting.live.peak


@pytest.mark.few(2)
@pytest.mark.parametrize("bounds", [(0, 8), (0, 40), (0, 163)], ids=str)
def test_a_trace_counts_what_every_block_does(bounds, monkeypatch):
    some = traced(bounds)
    # No tensor is one of these, so every block runs.
    monkeypatch.setattr(traced_loops, "FakeTensor", type("Never", (), {}))
    assert traced(bounds) == some


@pytest.mark.slow
def test_blocks_of_several_documents_differ_by_their_masks_alone(monkeypatch):
    bounds = (0, 3, 90, 163)
    operators, peak = traced(bounds)
    monkeypatch.setattr(traced_loops, "FakeTensor", type("Never", (), {}))
    every_operator, every_peak = traced(bounds)
    assert operators.total() == pytest.approx(every_operator.total(), rel=0.05)
    assert peak == pytest.approx(every_peak, rel=0.01)


def test_steps_with_data_all_run():
    assert list(in_a_trace_once(range(7), torch.zeros(1))) == list(range(7))


def test_loops_within_loops_multiply():
    with FakeTensorMode():
        fake = torch.zeros(1)
    counts = [
        (outer, inner, times())
        for outer in in_a_trace_once(range(6), fake)
        for inner in in_a_trace_once(range(5), fake)
    ]
    assert sum(count for *_, count in counts) == 30
    assert len(counts) == 9
    assert times() == 1

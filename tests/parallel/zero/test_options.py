"""What the device decides about ZeRO and AdamW, and where AdamW counts its steps."""

from __future__ import annotations

import pytest
import torch

from parallel.zero.options import default_stage, overlaps, uses_fused_adamw
from parallel.zero.partition import fill_moments, set_steps
from parallel.zero.uncompiled import AdamW


def test_a_gpu_gets_stage_2_overlap_and_a_fused_adamw():
    assert [default_stage(kind) for kind in ("cuda", "cpu")] == [2, 1]
    assert [overlaps(stage, "cuda", None) for stage in range(4)] == [False, True, True, True]
    assert [overlaps(stage, "cpu", None) for stage in range(4)] == [False, False, False, True]
    assert [overlaps(2, kind, wish) for kind, wish in (("cuda", False), ("cpu", True))] == [False, True]
    assert [uses_fused_adamw(kind, None) for kind in ("cuda", "cpu")] == [True, False]
    assert [uses_fused_adamw(kind, wish) for kind, wish in (("cuda", False), ("cpu", True))] == [False, True]


@pytest.mark.parametrize(("fused", "wanted"), [(True, "meta"), (False, "cpu")])
def test_steps_are_counted_where_adamw_looks_for_them(fused, wanted):
    """The fused kernel wants the counter beside the master; "meta" stands for a GPU here."""
    masters = [torch.zeros(3, device="meta", requires_grad=True), torch.zeros(0, device="meta", requires_grad=True)]
    inner = AdamW(masters, fused=fused, foreach=False)
    fill_moments(inner, masters)
    assert [state["step"].device.type for state in inner.state.values()] == [wanted], "a rank may hold nothing"
    set_steps(inner, 7)
    (state,) = inner.state.values()
    assert state["step"].device.type == wanted
    if not fused:
        assert float(state["step"]) == 7.0

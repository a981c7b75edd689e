"""What the device decides about ZeRO and AdamW, and where AdamW counts its steps."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from longctx.errors import ConfigError
from parallel.zero.cpu_adam import wait_for_build
from parallel.zero.optimizer import AdamW, fill_moments, set_steps
from parallel.zero.options import aligns, default_stage, overlaps, uses_fused_adamw


def test_a_build_that_was_killed_is_said_and_another_is_waited_for(tmp_path):
    """PyTorch waits for the lock of a killed build for ever, without a word."""
    lock = tmp_path / "lock"
    wait_for_build(lock)
    lock.touch()
    threading.Timer(0.3, lock.unlink).start()
    wait_for_build(lock)
    assert not lock.exists()
    lock.touch()
    os.utime(lock, (time.time() - 3600, time.time() - 3600))
    with pytest.raises(ConfigError, match=r"(?s)is 60 minutes old.*Remove that file"):
        wait_for_build(lock)


def test_a_gpu_gets_stage_2_overlap_alignment_and_a_fused_adamw():
    assert [aligns(kind, None) for kind in ("cuda", "cpu")] == [True, False]
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

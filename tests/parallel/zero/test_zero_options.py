"""What a run's options and its device come to in DeepSpeed's config and in AdamW, and what our AdamW computes."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from longctx.errors import ConfigError
from parallel.zero import deepspeed_config as config_module
from parallel.zero import partition
from parallel.zero.cpu_adam import wait_for_build
from parallel.zero.deepspeed_config import deepspeed_config
from parallel.zero.optimizer import AdamW, OptimizerOptions, fill_moments, set_steps
from parallel.zero.partition import Wrapping
from parallel.zero.zero_options import ZeroOptions, aligns, default_stage, overlaps, uses_fused_adamw

NOTHING: Any = None
"""In place of a model, which an optimiser is not made of."""
OF_ALL_STAGES = {"reduce_bucket_size": 11, "allgather_bucket_size": 12}
OF_STAGE_3 = {
    "prefetch_bucket_size": 13,
    "max_live_parameters": 14,
    "param_persistence_threshold": 15,
    "sub_group_size": 16,
    "hpz_partition_size": 2,
    "quantized_weights": True,
    "quantized_gradients": True,
}
NAMES_OF_DEEPSPEED = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "max_live_parameters": "stage3_max_live_parameters",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "hpz_partition_size": "zero_hpz_partition_size",
    "quantized_weights": "zero_quantized_weights",
    "quantized_gradients": "zero_quantized_gradients",
}


@pytest.fixture(params=["cuda", "cpu"])
def device_type(request, monkeypatch) -> str:
    """Kind of the device that DeepSpeed says it computes on."""
    for module in (config_module, partition):
        monkeypatch.setattr(module, "accelerator", lambda: request.param)
    return request.param


def section(stage: int, **options: Any) -> dict[str, Any]:
    return deepspeed_config(stage, torch.bfloat16, 1, 1.0, ZeroOptions(**options))["zero_optimization"]


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


def test_gradients_are_reduced_beside_backward_on_gpus(device_type):
    on_gpu = device_type == "cuda"
    assert [section(stage)["overlap_comm"] for stage in (1, 2, 3)] == [on_gpu, on_gpu, True]
    assert [section(stage)["parameter_alignment"] for stage in (1, 2)] == [on_gpu, on_gpu]
    for wish in (True, False):
        assert [section(stage, overlap_comm=wish)["overlap_comm"] for stage in (1, 2, 3)] == [wish] * 3


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_size_reaches_deepspeed(stage):
    options = OF_ALL_STAGES
    if stage == 3:
        options = OF_ALL_STAGES | OF_STAGE_3
    found = section(stage, **options)
    assert {key: found[NAMES_OF_DEEPSPEED.get(key, key)] for key in options} == options


def test_adamw_is_one_kernel_on_gpus(device_type):
    for wish, wanted in ((None, device_type == "cuda"), (True, True), (False, False)):
        wrapping = Wrapping(
            model=NOTHING,
            tensors=NOTHING,
            stage=2,
            dtype=torch.bfloat16,
            accumulation=1,
            options=OptimizerOptions(fused=wish),
            zero=ZeroOptions(),
            matrices={},
        )
        optimizer = wrapping._optimizer([{"params": [nn.Parameter(torch.zeros(3))]}])
        assert (optimizer.defaults["fused"], optimizer.defaults["foreach"]) == (wanted, False)


def trained(kind: type[torch.optim.AdamW], steps: int, state: dict | None = None, start: list | None = None):
    """Weights and optimiser after ``steps``; the gradient of each is another."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = kind(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    if state is not None and start is not None:
        optimizer.load_state_dict(state)
        for p, value in zip(model.parameters(), start, strict=True):
            p.data.copy_(value)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], optimizer


def test_it_steps_as_pytorchs_own_and_goes_on_from_its_state():
    (wanted, theirs), (got, ours) = trained(torch.optim.AdamW, 3), trained(AdamW, 3)
    assert all(map(torch.equal, got, wanted))
    assert ours.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
    on, _ = trained(AdamW, 2, theirs.state_dict(), wanted)
    assert all(map(torch.equal, on, trained(torch.optim.AdamW, 2, ours.state_dict(), got)[0]))

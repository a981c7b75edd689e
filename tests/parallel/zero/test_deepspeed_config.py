"""What a run's options come to in DeepSpeed's config and in AdamW, on GPUs and on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallel.zero import deepspeed_config as config_module
from parallel.zero import partition
from parallel.zero.deepspeed_config import deepspeed_config
from parallel.zero.optimizer import OptimizerOptions
from parallel.zero.options import ZeroOptions
from parallel.zero.partition import Wrapping

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
        )
        optimizer = wrapping._optimizer([{"params": [nn.Parameter(torch.zeros(3))]}])
        assert (optimizer.defaults["fused"], optimizer.defaults["foreach"]) == (wanted, False)

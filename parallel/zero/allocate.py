"""Memory for a model that was built on the meta device: a rank's part of it, unset, for a load to fill.

When it starts, DeepSpeed sends every rank the weights of rank 0. Ours are unset then, or equal on all ranks, so nothing
is sent. In stage 3 it expects the full module on each device before it partitions it: ours is partitioned before, one
parameter at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch import nn

from longctx.model.layers.initialize import initial_buffer
from longctx.objectives.task import Task
from parallel.zero.swapping import WeightSwapper
from parallel.zero.tensors import ExpertsAcrossRanks


def allocate(
    model: Task,
    *,
    stage: int,
    dtype: torch.dtype,
    config: dict[str, Any],
    experts: ExpertsAcrossRanks | None,
    swapper: WeightSwapper | None = None,
) -> None:
    """Allocate the parameters and buffers of a model that are on meta on DeepSpeed's device; move the others there.

    Parameters get ``dtype``; in stage 3 each rank gets its part of them, and ``swapper`` takes those that the config
    offloads to a disk. Collective in stage 3.
    """
    accelerator: Any = get_accelerator()
    device = torch.device(accelerator.current_device_name())
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, torch.full_like(buffer, initial_buffer(name), device=device))
            else:
                setattr(module, name, buffer.to(device))
    if stage == 3:
        deepspeed.init_distributed(accelerator.communication_backend_name())
        _partition(model, dtype, config, experts, swapper)
        return
    for p in model.parameters():
        _make_whole(p, dtype, device)


@contextmanager
def nothing_is_sent() -> Iterator[None]:
    """Make DeepSpeed's engines that start within the block keep the weights that each rank has."""
    broadcast = DeepSpeedEngine._broadcast_model
    DeepSpeedEngine._broadcast_model = lambda engine: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = broadcast  # type: ignore[method-assign]


def _make_whole(p: nn.Parameter, dtype: torch.dtype, device: torch.device) -> None:
    """Allocate a full parameter, unset if it was on meta, with its values otherwise."""
    if p.is_meta:
        whole = nn.Parameter(torch.empty(p.shape, dtype=dtype, device=device), requires_grad=p.requires_grad)
        # The same object for all that refer to it, with its marks: data cannot move from meta to a device.
        for mark, value in vars(p).items():
            setattr(whole, mark, value)
        torch.utils.swap_tensors(p, whole)
    else:
        p.data = p.data.to(device, dtype)


def _partition(
    model: Task,
    dtype: torch.dtype,
    config: dict[str, Any],
    experts: ExpertsAcrossRanks | None,
    swapper: WeightSwapper | None,
) -> None:
    """Hand the module to DeepSpeed's stage 3, one parameter at a time: a rank keeps only its part."""
    if experts is not None:
        # Otherwise DeepSpeed would create these groups, and assign weights to them, too late for this.
        experts.set_deepspeed_parallelism()
        for p in model.parameters():
            if getattr(p, "group_name", None) == experts.ep_group_name:
                p.ds_zero_partition_process_group = experts.replicas  # type: ignore[attr-defined]
    _OneByOne(dtype, module=model, config_dict_or_path=config, param_swapper=swapper)


class _OneByOne(deepspeed.zero.Init):
    """DeepSpeed's conversion of a module, without sending: at most one parameter is full at a time."""

    def __init__(self, param_dtype: torch.dtype, **options: Any) -> None:
        self._param_dtype = param_dtype  # DeepSpeed's own ``dtype`` is bfloat16 if there is no float16
        super().__init__(**options)

    def _convert_to_zero_parameters(self, param_list: Iterable[nn.Parameter]) -> None:
        for p in param_list:
            if not is_zero_param(p):
                _make_whole(p, self._param_dtype, self.local_device)
                self._convert_to_deepspeed_param(p)
                p.partition()  # type: ignore[attr-defined]

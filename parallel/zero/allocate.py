"""Memory for a model built on the meta device: a rank's uninitialized partition, which a load then fills.

At startup DeepSpeed broadcasts rank 0's weights. Ours are uninitialized at that point, or equal on all ranks, so the
broadcast is disabled. Stage 3 expects the full module on each device before partitioning it: here, parameters are
partitioned one at a time instead.
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
from parallel.zero.model_tensors import ExpertsAcrossRanks
from parallel.zero.swapping import WeightSwapper


def allocate(
    model: Task,
    *,
    stage: int,
    dtype: torch.dtype,
    config: dict[str, Any],
    experts: ExpertsAcrossRanks | None,
    swapper: WeightSwapper | None = None,
) -> None:
    """Allocate a model's meta parameters and buffers on DeepSpeed's device; move all others there.

    Parameters get ``dtype``, except quantized ones. In stage 3 each rank gets its partition, and ``swapper`` takes
    those that the config offloads to disk. Collective in stage 3.
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
def disable_broadcast() -> Iterator[None]:
    """Disable the weight broadcast in DeepSpeed engines created in the ``with`` block: each rank keeps its weights."""
    broadcast = DeepSpeedEngine._broadcast_model
    DeepSpeedEngine._broadcast_model = lambda engine: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = broadcast  # type: ignore[method-assign]


def _make_whole(p: nn.Parameter, dtype: torch.dtype, device: torch.device) -> None:
    """Allocate a full parameter, uninitialized if it was on meta; otherwise keep its values."""
    if not p.is_floating_point():
        dtype = p.dtype
    if p.is_meta:
        whole = nn.Parameter(torch.empty(p.shape, dtype=dtype, device=device), requires_grad=p.requires_grad)
        # Swap instead of assigning data, which cannot move from meta to a device: all references and marks stay valid.
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
    """Convert the module to DeepSpeed's stage 3, one parameter at a time: a rank keeps only its partition."""
    if experts is not None:
        # DeepSpeed would otherwise create these groups and assign weights to them only after the conversion.
        experts.set_deepspeed_parallelism()
        for p in model.parameters():
            if getattr(p, "group_name", None) == experts.ep_group_name:
                p.ds_zero_partition_process_group = experts.replicas  # type: ignore[attr-defined]
    _OneByOne(dtype, module=model, config_dict_or_path=config, param_swapper=swapper)


class _OneByOne(deepspeed.zero.Init):
    """DeepSpeed's module conversion, without broadcasts: at most one parameter is full at a time."""

    def __init__(self, param_dtype: torch.dtype, **options: Any) -> None:
        self._param_dtype = param_dtype  # DeepSpeed's own ``dtype`` falls back to bfloat16 unless it is float16
        super().__init__(**options)

    def _convert_to_zero_parameters(self, param_list: Iterable[nn.Parameter]) -> None:
        for p in param_list:
            if not is_zero_param(p):
                _make_whole(p, self._param_dtype, self.local_device)
                self._convert_to_deepspeed_param(p)
                p.partition()  # type: ignore[attr-defined]

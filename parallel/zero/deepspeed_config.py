"""DeepSpeed's config and log level."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger as deepspeed_logger

from parallel.zero.zero_options import ZeroOptions, aligns, overlaps, update_size


def deepspeed_config(
    stage: int, dtype: torch.dtype, accumulation: int, clip_norm: float, zero: ZeroOptions, *, swap_path: str = ""
) -> dict[str, Any]:
    """Build DeepSpeed's config. ``clip_norm`` 0 disables clipping. ``swap_path`` is the folder for NVMe offload."""
    return {
        "train_micro_batch_size_per_gpu": 1,  # bookkeeping only: our loader defines the micro-batch
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip_norm,
        "zero_optimization": _zero_section(stage, zero, swap_path),
        "zero_allow_untested_optimizer": True,  # it checks for PyTorch's exact AdamW type; ours is a subclass
        "bf16": {"enabled": dtype == torch.bfloat16, "check_grad_overflow": True, "immediate_grad_update": True},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 2**62,
    }


def accelerator() -> str:
    """Return DeepSpeed's device type: "cpu", "cuda"."""
    chosen = get_accelerator()
    assert chosen is not None, "importing DeepSpeed chooses one"
    return chosen.device_name()


def _zero_section(stage: int, zero: ZeroOptions, swap_path: str) -> dict[str, Any]:
    section: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": overlaps(stage, accelerator(), zero.overlap_comm),
        "reduce_bucket_size": zero.reduce_bucket_size,
        "allgather_bucket_size": zero.allgather_bucket_size,
    }
    if stage in (1, 2):
        section["parameter_alignment"] = aligns(accelerator(), zero.parameter_alignment)
    if stage == 3:
        section |= {
            "stage3_prefetch_bucket_size": zero.prefetch_bucket_size,
            "stage3_max_live_parameters": zero.max_live_parameters,
            "stage3_param_persistence_threshold": zero.param_persistence_threshold,
            "sub_group_size": update_size(zero.offload, zero.sub_group_size),
            "zero_hpz_partition_size": zero.hpz_partition_size,
            "zero_quantized_weights": zero.quantized_weights,
            "zero_quantized_gradients": zero.quantized_gradients,
        }
    for key, device in (("offload_optimizer", zero.offload), ("offload_param", zero.offload_parameters)):
        if device != "none":
            section[key] = {"device": device, "pin_memory": zero.pin_memory}
        if device == "nvme":
            section[key]["nvme_path"] = swap_path
    if zero.offload_parameters == "nvme":
        # Otherwise DeepSpeed keeps the first billion weights in memory.
        section["offload_param"]["max_in_cpu"] = 0
    return section


def quiet_deepspeed() -> None:
    """Prevent DeepSpeed from compiling an operator that training never calls, and from logging below errors."""
    # Without this, every CPU start runs g++ and ninja for deepspeed_shm_comm, which only inference uses.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed_logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")

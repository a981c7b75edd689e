"""What DeepSpeed is told: its config, and how much it says."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger as deepspeed_logger

from parallel.zero.options import ZeroOptions, aligns, overlaps


def deepspeed_config(
    stage: int, dtype: torch.dtype, accumulation: int, clip_norm: float, zero: ZeroOptions
) -> dict[str, Any]:
    """DeepSpeed's config. It clips by ``clip_norm``; 0 never."""
    return {
        "train_micro_batch_size_per_gpu": 1,  # bookkeeping only: our loader decides what a micro-batch is
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip_norm,
        "zero_optimization": _zero_section(stage, zero),
        "zero_allow_untested_optimizer": True,  # it knows PyTorch's AdamW by its very type; ours inherits from it
        "bf16": {"enabled": dtype == torch.bfloat16, "check_grad_overflow": True, "immediate_grad_update": True},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 2**62,
    }


def accelerator() -> str:
    """Kind of the device that DeepSpeed computes on: "cpu", "cuda"."""
    chosen = get_accelerator()
    assert chosen is not None, "importing DeepSpeed chooses one"
    return chosen.device_name()


def _zero_section(stage: int, zero: ZeroOptions) -> dict[str, Any]:
    """DeepSpeed's ``zero_optimization``."""
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
            "sub_group_size": zero.sub_group_size,
            "zero_hpz_partition_size": zero.hpz_partition_size,
            "zero_quantized_weights": zero.quantized_weights,
            "zero_quantized_gradients": zero.quantized_gradients,
        }
    for key, device in (("offload_optimizer", zero.offload), ("offload_param", zero.offload_parameters)):
        if device != "none":
            section[key] = {"device": device, "pin_memory": zero.pin_memory}
    return section


def quiet_deepspeed() -> None:
    """Keep DeepSpeed from compiling an operator that training never calls, and from talking over our log."""
    # Without this every start on a CPU runs g++ and ninja for deepspeed_shm_comm, which only inference uses.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed_logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")

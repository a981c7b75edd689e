"""What DeepSpeed is told: its config, and how much it says."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger as deepspeed_logger

from parallel.zero.options import ZeroOptions, overlaps


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
        "bf16": {"enabled": dtype == torch.bfloat16, "check_grad_overflow": True},  # ``ZeroEngine.step`` counts on it
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
    return {
        "stage": stage,
        "overlap_comm": overlaps(stage, accelerator(), zero.overlap_comm),
        "reduce_bucket_size": zero.reduce_bucket_size,
        "allgather_bucket_size": zero.allgather_bucket_size,
    }


def quiet_deepspeed() -> None:
    """Keep DeepSpeed from compiling an operator that training never calls, and from talking over our log."""
    # Without this every start on a CPU runs g++ and ninja for deepspeed_shm_comm, which only inference uses.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed_logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")

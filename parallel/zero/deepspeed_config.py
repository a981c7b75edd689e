"""What DeepSpeed is told: its config, and how much it says."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import torch
from deepspeed.utils import logger as deepspeed_logger

from longctx.errors import ConfigError


def check_zero(stage: int, dtype: torch.dtype) -> None:
    """ConfigError unless DeepSpeed can train in this stage and dtype with fp32 accumulation."""
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"zero.stage={stage} must be 0, 1, 2 or 3.")
    if stage == 0 and dtype == torch.bfloat16:
        raise ConfigError(
            "zero.stage=0 with train.dtype=bfloat16 would add gradients up in bfloat16: DeepSpeed refuses fp32 "
            "accumulation there.\nTry zero.stage=1."
        )


def deepspeed_config(stage: int, dtype: torch.dtype, accumulation: int, clip_norm: float) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # bookkeeping only: our loader decides what a micro-batch is
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip_norm,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,  # it knows PyTorch's AdamW by its very type; ours inherits from it
        "bf16": {"enabled": dtype == torch.bfloat16, "check_grad_overflow": True},  # ``ZeroEngine.step`` counts on it
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 2**62,
    }


def quiet_deepspeed() -> None:
    """Keep DeepSpeed from compiling an operator that training never calls, and from talking over our log."""
    # Without this every start on a CPU runs g++ and ninja for deepspeed_shm_comm, which only inference uses.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed_logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")

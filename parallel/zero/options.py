"""What a run decides about ZeRO beside its stage, and what is decided for it by the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longctx.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """Settings of DeepSpeed's ``zero_optimization``. Sizes count values, not bytes."""

    overlap_comm: bool | None = None
    """Whether gradients are reduced while backward goes on; None: where it pays (``overlaps``)."""
    reduce_bucket_size: int = 50_000_000
    """Gradients that are reduced at once."""
    allgather_bucket_size: int = 500_000_000
    """Updated weights that stages 1 and 2 gather at once."""


def default_stage(device_type: str) -> int:
    """What ``zero.stage = "auto"`` is: 2 on GPUs, else 1.

    Stage 1 keeps all float32 gradients on each rank: 32 GB of an 8B model. Stage 2 spreads them and reduces them in
    buckets while backward goes on. On a CPU nothing overlaps, and one reduction at the end of the step is faster.
    """
    if device_type == "cuda":
        return 2
    return 1


def overlaps(stage: int, device_type: str, wish: bool | None) -> bool:
    """Whether DeepSpeed reduces gradients (and gathers weights, in stage 3) beside backward.

    Stage 3 prefetches everywhere. Stages 1 and 2 need a second stream, which a CPU has not.
    """
    if wish is not None:
        return wish
    return stage == 3 or (stage > 0 and device_type == "cuda")


def uses_fused_adamw(device_type: str, wish: bool | None) -> bool:
    """Whether AdamW updates in one kernel: on GPUs, where the other forms hold temporaries of twice the partition.

    On a CPU the plain form stays: the fused one rounds otherwise.
    """
    if wish is not None:
        return wish
    return device_type == "cuda"


def check_zero(stage: int, dtype: torch.dtype) -> None:
    """ConfigError unless DeepSpeed can train in this stage and dtype with fp32 accumulation."""
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f'zero.stage={stage} must be 0, 1, 2 or 3, or "auto".')
    if stage == 0 and dtype == torch.bfloat16:
        raise ConfigError(
            "zero.stage=0 with train.dtype=bfloat16 would add gradients up in bfloat16: DeepSpeed refuses fp32 "
            "accumulation there.\nTry zero.stage=1."
        )

"""ZeRO options apart from the stage, and their device-dependent defaults."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longctx.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """Settings for DeepSpeed's ``zero_optimization``. Sizes count values, not bytes."""

    overlap_comm: bool | None = None
    """Whether gradient reduction overlaps with backward; None: if it pays (``overlaps``)."""
    reduce_bucket_size: int = 50_000_000
    """Gradient values per reduction."""
    allgather_bucket_size: int = 500_000_000
    """Updated weights that stages 1 and 2 gather at once."""
    parameter_alignment: bool | None = None
    """Whether stages 1 and 2 align each parameter to 16 bytes; None: on GPUs, whose grouped matmuls need it."""
    prefetch_bucket_size: int = 50_000_000
    """Weights that stage 3 gathers ahead of use."""
    max_live_parameters: int = 1_000_000_000
    """Most gathered weights that stage 3 keeps."""
    param_persistence_threshold: int = 100_000
    """Parameters below this size stay unpartitioned in stage 3."""
    sub_group_size: int | None = None
    """Parameters that stage 3 updates at once; None: see ``update_size``."""
    hpz_partition_size: int = 1
    """Ranks, such as one node's, that keep a secondary copy of the weights partitioned among them (hpZ)."""
    quantized_weights: bool = False
    """Whether stage 3 gathers weights in 8 bits (qwZ)."""
    quantized_gradients: bool = False
    """Whether stage 3 reduces gradients in 4 and 8 bits (qgZ)."""
    offload: str = "none"
    """Placement of masters, moments and gradients: "none" is the device; "cpu" the host memory, and AdamW runs there;
    "nvme" a disk, from which stage 3 reads one sub-group at a time."""
    offload_parameters: str = "none"
    """Placement of stage 3's weight partition."""
    nvme_path: str = ""
    """Folder on that disk."""
    pin_memory: bool = True
    """Whether offloaded data is in page-locked memory, which makes copies faster."""

    @property
    def swaps(self) -> bool:
        """True if any state is on disk."""
        return "nvme" in (self.offload, self.offload_parameters)


def default_stage(device_type: str) -> int:
    """Return the stage for ``zero.stage = "auto"``: 2 on GPUs, otherwise 1.

    Stage 1 keeps all float32 gradients on each rank: 32 GB for an 8B model. Stage 2 partitions them and reduces them in
    buckets during backward. On a CPU nothing overlaps, and one reduction at the end of the step is faster.
    """
    if device_type == "cuda":
        return 2
    return 1


def overlaps(stage: int, device_type: str, requested: bool | None) -> bool:
    """Return True if DeepSpeed reduces gradients (and gathers weights, in stage 3) during backward.

    Stage 3 prefetches on all devices. Stages 1 and 2 need a second stream, which a CPU does not have.
    """
    if requested is not None:
        return requested
    return stage == 3 or (stage > 0 and device_type == "cuda")


def aligns(device_type: str, requested: bool | None) -> bool:
    """Return True if stages 1 and 2 pad flat buffers so that each parameter is 16-byte aligned."""
    if requested is not None:
        return requested
    return device_type == "cuda"


def uses_fused_adamw(device_type: str, requested: bool | None) -> bool:
    """Return True if AdamW updates in one kernel: on GPUs, since other forms need temporaries twice the partition's
    size.

    On a CPU the plain form is used: the fused one rounds differently.
    """
    if requested is not None:
        return requested
    return device_type == "cuda"


def update_size(offload: str, requested: int | None) -> int:
    """Return the parameters that stage 3 updates at once: 1 billion (DeepSpeed's default), or 100 million from a disk.

    With a disk, memory holds four times one sub-group in float32, so a larger one would save no memory for most models.
    """
    if requested is not None:
        return requested
    if offload == "nvme":
        return 100_000_000
    return 1_000_000_000


def check_device(zero: ZeroOptions, device_type: str) -> None:
    """Raise ConfigError for options that DeepSpeed supports only on GPUs."""
    for key, wanted in (
        ("quantized_weights", zero.quantized_weights),
        ("quantized_gradients", zero.quantized_gradients),
    ):
        if wanted and device_type != "cuda":
            raise ConfigError(
                f"zero.{key}=true needs GPUs: its quantizer is not implemented on the CPU.\n"
                f"Leave it out (zero.{key}=false)."
            )


def check_zero(stage: int, dtype: torch.dtype) -> None:
    """Raise ConfigError unless DeepSpeed can train in this stage and dtype with fp32 accumulation."""
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f'zero.stage={stage} must be 0, 1, 2 or 3, or "auto".')
    if stage == 0 and dtype == torch.bfloat16:
        raise ConfigError(
            "zero.stage=0 with train.dtype=bfloat16 would accumulate gradients in bfloat16: DeepSpeed rejects fp32 "
            "accumulation there.\nTry zero.stage=1."
        )

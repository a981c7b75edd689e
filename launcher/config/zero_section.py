"""The ``[zero]`` section: its rules, and its options for DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from launcher.config.config_sections import RunConfig, ZeroSection
from longctx.errors import ConfigError
from parallel.zero.zero_options import ZeroOptions, check_zero, default_stage


def zero_options(zero: ZeroSection) -> ZeroOptions:
    """Return the options for ``ZeroEngine``, except the stage."""
    return ZeroOptions(
        overlap_comm={"auto": None, "on": True, "off": False}[zero.overlap_comm],
        reduce_bucket_size=zero.reduce_bucket_size,
        allgather_bucket_size=zero.allgather_bucket_size,
        prefetch_bucket_size=zero.prefetch_bucket_size,
        max_live_parameters=zero.max_live_parameters,
        param_persistence_threshold=zero.param_persistence_threshold,
        sub_group_size=None if isinstance(zero.sub_group_size, str) else zero.sub_group_size,
        hpz_partition_size=zero.hpz_partition_size,
        quantized_weights=zero.quantized_weights,
        quantized_gradients=zero.quantized_gradients,
        offload=zero.offload,
        offload_parameters=zero.offload_parameters,
        pin_memory=zero.pin_memory,
        nvme_path=zero.nvme_path,
    )


_READ_BY: Mapping[str, Sequence[int]] = {
    "overlap_comm": (1, 2, 3),
    "reduce_bucket_size": (1, 2, 3),
    "allgather_bucket_size": (1, 2),
    "offload": (1, 2, 3),
    "pin_memory": (1, 2, 3),
    "prefetch_bucket_size": (3,),
    "max_live_parameters": (3,),
    "param_persistence_threshold": (3,),
    "sub_group_size": (3,),
    "hpz_partition_size": (3,),
    "quantized_weights": (3,),
    "quantized_gradients": (3,),
    "offload_parameters": (3,),
    "nvme_path": (3,),
}
"""Stages that read a key."""


def check_zero_section(config: RunConfig, world_size: int) -> None:
    """Raise ConfigError for the section's first broken rule."""
    # For "auto", the dtype that every device and stage supports.
    dtype = torch.float32
    if config.train.dtype != "auto":
        dtype = getattr(torch, config.train.dtype)
    check_zero(_stage(config.zero), dtype)
    _check_stage_reads(config)
    _check_offload(config)
    size = config.zero.allgather_bucket_size
    if size < 2 or size % 2:
        raise ConfigError(
            f"zero.allgather_bucket_size={size} must be even and at least 2: DeepSpeed aligns its buffers to pairs "
            f"of values.\nTry {max(2, size + size % 2)}."
        )
    _check_hpz(config, world_size)


def _stage(zero: ZeroSection) -> int:
    """Return the stage; for "auto", the CPU's default, which every machine supports."""
    if zero.stage == "auto":
        return default_stage("cpu")
    return zero.stage


def _check_stage_reads(config: RunConfig) -> None:
    # An option that the stage does not read is an error: its user expects an effect.
    defaults = ZeroSection()
    for key, stages in _READ_BY.items():
        value, default = getattr(config.zero, key), getattr(defaults, key)
        # "auto" is stage 1 or 2, which read the same keys.
        if value != default and _stage(config.zero) not in stages:
            read_by = f"stages {', '.join(map(str, stages))} read it"
            if len(stages) == 1:
                read_by = f"only stage {stages[0]} reads it"
            raise ConfigError(
                f"zero.{key}={value} has no effect in zero.stage={config.zero.stage}: {read_by}.\n"
                f"Leave it out (zero.{key}={default}), or set zero.stage={stages[-1]}."
            )


def _check_offload(config: RunConfig) -> None:
    """Raise ConfigError for offloading without a path or with Muon, or page-locking options without offloading."""
    if config.train.optimizer == "muon" and config.zero.offload != "none":
        raise ConfigError(
            f"zero.offload={config.zero.offload} updates offloaded weights with DeepSpeed's AdamW, not train.optimizer="
            "muon.\nSet zero.offload=none, or train.optimizer=adamw."
        )
    zero = config.zero
    if not zero.pin_memory and zero.offload == zero.offload_parameters == "none":
        raise ConfigError(
            "zero.pin_memory=False has no effect without offload.\nLeave it out, or set zero.offload=cpu."
        )
    # DeepSpeed's stages 1 and 2 would silently treat nvme as cpu, so every misuse of nvme is an error here.
    swapped = [key for key in ("offload", "offload_parameters") if getattr(zero, key) == "nvme"]
    if not swapped:
        if zero.nvme_path:
            raise ConfigError(
                f"zero.nvme_path={zero.nvme_path!r} has no effect: neither zero.offload nor zero.offload_parameters is "
                "nvme.\nLeave it out, or set zero.offload=nvme."
            )
        return
    if _stage(config.zero) != 3:
        raise ConfigError(
            f"zero.{swapped[0]}=nvme needs zero.stage=3, and this is stage {_stage(config.zero)}: DeepSpeed's stages 1 "
            "and 2 treat it as cpu.\nTry zero.stage=3, or zero.offload=cpu."
        )
    if not zero.nvme_path:
        raise ConfigError(
            f"zero.{swapped[0]}=nvme needs zero.nvme_path, a folder on each machine's own fast disk.\n"
            "Try --zero.nvme_path /local_nvme/swap."
        )
    if zero.offload_parameters == "nvme" and zero.hpz_partition_size > 1:
        raise ConfigError(
            f"zero.offload_parameters=nvme with zero.hpz_partition_size={zero.hpz_partition_size}: DeepSpeed makes "
            "hpZ's second copy on a device named nvme, which PyTorch does not know.\n"
            "Try zero.hpz_partition_size=1, or zero.offload_parameters=cpu."
        )


def _check_hpz(config: RunConfig, world_size: int) -> None:
    """Raise ConfigError unless hpZ's group size divides the ranks; DeepSpeed has no hpZ for experts."""
    size = config.zero.hpz_partition_size
    if size < 1:
        raise ConfigError(f"zero.hpz_partition_size={size} must be at least 1.")
    if world_size % size:
        nearest = max(n for n in range(1, size) if world_size % n == 0)
        raise ConfigError(f"zero.hpz_partition_size={size} does not divide the {world_size} ranks.\nTry {nearest}.")
    if config.parallel.expert > 1 and (size > 1 or config.zero.quantized_gradients):
        raise ConfigError(
            f"zero.hpz_partition_size={size} and zero.quantized_gradients={config.zero.quantized_gradients} with "
            f"parallel.expert={config.parallel.expert}: DeepSpeed's AutoEP with ZeRO Stage 3 supports neither "
            "hpZeRO secondary tensor groups nor zero_quantized_gradients yet.\n"
            "Leave them out, or set parallel.expert=1."
        )

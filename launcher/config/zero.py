"""The ``[zero]`` section: what DeepSpeed is given of it, and its rules."""

from __future__ import annotations

from launcher.config.sections import RunConfig, ZeroSection
from longctx.errors import ConfigError
from parallel.zero.options import ZeroOptions, check_zero


def zero_options(zero: ZeroSection) -> ZeroOptions:
    """What ``ZeroEngine`` is given beside the stage."""
    return ZeroOptions(
        overlap_comm={"auto": None, "on": True, "off": False}[zero.overlap_comm],
        reduce_bucket_size=zero.reduce_bucket_size,
        allgather_bucket_size=zero.allgather_bucket_size,
    )


def check_zero_section(config: RunConfig) -> None:
    """ConfigError for the first rule of the section that does not hold."""
    check_zero(config.zero_stage, config.dtype)
    size = config.zero.allgather_bucket_size
    if size < 2 or size % 2:
        raise ConfigError(
            f"zero.allgather_bucket_size={size} must be even and at least 2: DeepSpeed aligns what it sends to pairs "
            f"of values.\nTry {max(2, size + size % 2)}."
        )

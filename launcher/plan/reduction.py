"""What DeepSpeed makes to reduce gradients, by arithmetic: it runs around the step that is traced, not in it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch

from launcher.config.sections import RunConfig
from launcher.config.zero import zero_options
from longctx.architecture.size import count_parameters
from parallel.zero.options import overlaps

FLAT_VALUES = 500_000_000
"""Gradients that one flat copy holds where they are reduced after backward (DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE)."""
FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """Bytes beside the gradients themselves."""

    within_backward: int
    """Buckets, and the copies that one bucket becomes on its way."""
    after_backward: int
    """A flat copy of gradients, where they are reduced when all are there."""


def reduction_bytes(
    config: RunConfig, parameters: Mapping[str, torch.Size], experts: Set[str], *, world_size: int, device: str
) -> Reduction:
    """What the config's ZeRO stage takes on a ``device`` ("cuda", "cpu") that holds these ``parameters``.

    ``experts`` names those of them that fewer ranks share: they are reduced apart from the others.
    """
    stage = config.zero_stage
    sizes = {name: shape.numel() for name, shape in parameters.items()}
    if stage == 0 or (stage == 1 and config.dtype == torch.bfloat16 and config.zero.offload == "none"):
        of_experts = sum(size for name, size in sizes.items() if name in experts)
        of_others = sum(sizes.values()) - of_experts
        flat = max(min(max(of_experts, of_others), FLAT_VALUES), *sizes.values())
        return Reduction(within_backward=0, after_backward=flat * FLOAT32)
    bucket = config.zero.reduce_bucket_size
    # A tensor that no bucket has room for is reduced by itself.
    values = max(min(bucket, sum(sizes.values())), *sizes.values())
    if stage == 3:
        # The bucket stays for good; what it is cut into and padded for the message are two copies.
        return Reduction(within_backward=(bucket + 2 * values) * FLOAT32, after_backward=0)
    means = 0
    if config.dtype == torch.float32 and (stage == 1 or config.accumulation(world_size) > 1):
        # This rank's part of the mean stands beside what was added up over micro-batches.
        means = -(-sum(count_parameters(config.model.config()).values()) // world_size) * FLOAT32
    overlap = overlaps(stage, device, zero_options(config.zero).overlap_comm)
    if stage == 1 and not overlap:
        return Reduction(within_backward=0, after_backward=means)
    return Reduction(within_backward=means + _buckets(bucket, values, config.dtype.itemsize, overlap), after_backward=0)


def _buckets(bucket: int, values: int, width: int, overlap: bool) -> int:
    """Bytes of stage 1's and 2's buckets, and of one message of so many ``values``."""
    buckets = 1
    if overlap:
        buckets = 2
    # A gradient waits for its bucket to go. Pieces of a bucket for one rank are laid end to end, and sent in float32.
    message = 2 * values * width
    if width != FLOAT32:
        # The copy in float32. Two more gradients have been seen alive beside it; why, DeepSpeed's source does not say.
        message += (2 * width + FLOAT32) * values
    return buckets * bucket * width + message

"""What DeepSpeed makes to reduce gradients, by arithmetic: it runs around the step that is traced, not in it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch

from launcher.config.resolved import ResolvedConfig
from launcher.config.zero import zero_options
from longctx.architecture.size import count_parameters
from parallel.zero.options import overlaps

FLAT_VALUES = 500_000_000
"""Gradients that one flat copy holds where they are reduced after backward (DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE)."""
FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """Bytes beside the gradients themselves."""

    buckets: int = 0
    """That are there all through backward."""
    message: int = 0
    """The copies that one bucket becomes on its way."""
    kept_share: float = 1.0
    """Of what layers keep for backward, what is still there when the first bucket goes; 0 where it goes at the end."""
    after_backward: int
    """A flat copy of gradients, where they are reduced when all are there."""

    @property
    def within_backward(self) -> int:
        """Both."""
        return self.buckets + self.message

    def beside(self, kept: int, passing: int) -> int:
        """What it adds to the peak of a backward pass: a bucket that goes late goes when layers have let go of much."""
        gone = (1 - self.kept_share) * kept
        if not self.kept_share:
            gone += passing
        return max(self.buckets, self.within_backward - int(gone))


def reduction_bytes(
    config: ResolvedConfig, parameters: Mapping[str, torch.Size], experts: Set[str], *, world_size: int, device: str
) -> Reduction:
    """What the config's ZeRO stage takes on a ``device`` ("cuda", "cpu") that holds these ``parameters``.

    ``experts`` names those of them that fewer ranks share: they are reduced apart from the others.
    """
    stage = config.zero.stage
    sizes = {name: shape.numel() for name, shape in parameters.items()}
    if stage == 0 or (stage == 1 and config.dtype == torch.bfloat16 and config.zero.offload == "none"):
        of_experts = sum(size for name, size in sizes.items() if name in experts)
        of_others = sum(sizes.values()) - of_experts
        flat = max(min(max(of_experts, of_others), FLAT_VALUES), *sizes.values())
        return Reduction(after_backward=flat * FLOAT32)
    bucket = config.zero.reduce_bucket_size
    kept_share = _kept_share(sizes, bucket)
    # A tensor that no bucket has room for is reduced by itself.
    values = max(min(bucket, sum(sizes.values())), *sizes.values())
    if stage == 3:
        # The bucket stays for good; what it is cut into and padded for the message are two copies.
        return Reduction(
            buckets=bucket * FLOAT32, message=2 * values * FLOAT32, kept_share=kept_share, after_backward=0
        )
    means = 0
    if config.dtype == torch.float32 and (stage == 1 or config.accumulation(world_size) > 1):
        # This rank's part of the mean stands beside what was added up over micro-batches.
        means = -(-sum(count_parameters(config.model.config()).values()) // world_size) * FLOAT32
    overlap = overlaps(stage, device, zero_options(config.zero).overlap_comm)
    if stage == 1 and not overlap:
        return Reduction(after_backward=means)
    width = config.dtype.itemsize
    return Reduction(
        buckets=means + (1 + overlap) * bucket * width,
        message=_message(values, width),
        kept_share=kept_share,
        after_backward=0,
    )


def _message(values: int, width: int) -> int:
    """Bytes of stage 1's and 2's messages of so many ``values``."""
    # A gradient waits for its bucket to go. Pieces of a bucket for one rank are laid end to end, and sent in float32.
    message = 2 * values * width
    if width != FLOAT32:
        # The copy in float32. Two more gradients have been seen alive beside it; why, DeepSpeed's source does not say.
        message += (2 * width + FLOAT32) * values
    return message


def _kept_share(sizes: Mapping[str, int], bucket: int) -> float:
    """The share of layers that are before backward, or in it, when gradients first are more than a ``bucket`` takes."""
    places = [(_layer_of(name), size) for name, size in sizes.items()]
    num_layers = 1 + max((place for place, _ in places if place is not None), default=0)
    filled, share = 0, 1.0
    for place, size in reversed(places):
        filled += size
        if place is not None:
            share = (place + 1) / num_layers
        elif share < 1:
            share = 0.0  # embeddings, behind the first layer
        if filled > bucket:
            return share
    return 0.0


def _layer_of(name: str) -> int | None:
    """The number of the layer that a parameter is in."""
    _, layers, behind = name.partition(".layers.")
    if not layers:
        return None
    return int(behind.partition(".")[0])

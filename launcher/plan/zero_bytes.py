"""A rank's device bytes under ZeRO, by arithmetic: a traced step does not include DeepSpeed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch
from torch import nn

from launcher.config.resolved import ResolvedConfig
from launcher.config.zero_section import zero_options
from launcher.plan.memory_estimate import FLOAT32, memory_of_rank
from launcher.plan.parameters import num_trained_of_all
from longctx.model.experts.experts import is_expert_weight
from parallel.mesh import Mesh
from parallel.zero.zero_options import overlaps

FLAT_VALUES = 500_000_000
"""Gradient values per flat copy, if they are reduced after backward (DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE)."""


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """A rank's device bytes in one step, by kind; plain values, which become JSON.

    The first six come from arithmetic in plans and traces, ``process`` is measured; a trace counts the others.
    """

    weights: int
    """Working weights that the ZeRO stage leaves on this device."""
    gradients: int
    optimizer: int
    """Float32 masters and AdamW's two moments."""
    gathered: int
    """Full weights that ZeRO 3 gathers at once, at most."""
    reduction: int
    """Added at the peak by DeepSpeed's gradient buckets, and by the copies made from one bucket."""
    after_backward: int
    """Flat gradient copy that stages without buckets reduce, after all activations are freed."""
    kept: int
    """Live bytes between forward and backward."""
    kept_on_host: int
    """Pinned host bytes stored from activations; in addition to ``kept``, and in no other field."""
    kept_on_disk: int = 0
    """Bytes stored in train.store_path; a trace has no disk."""
    passing: int
    """Added at the peak in forward and backward."""
    optimizer_step: int
    """Temporaries in AdamW's step, after all activations are freed."""
    process: int = 0
    """Host memory that a rank's program takes on a CPU."""

    @property
    def held(self) -> int:
        """Bytes held throughout training."""
        return self.process + self.weights + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """Peak bytes in a step."""
        within = self.gathered + self.reduction + self.kept + self.passing
        return self.held + max(within, self.after_backward, self.optimizer_step)


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """Gradient reduction bytes, apart from the gradients themselves."""

    buckets: int = 0
    """Allocated throughout backward."""
    message: int = 0
    """Copies made from one bucket for its message."""
    kept_share: float = 1.0
    """Share of saved activations still alive when the first bucket is sent; 0 if it is sent at the end."""
    after_backward: int
    """Flat gradient copy, if gradients are reduced once all are complete."""

    @property
    def within_backward(self) -> int:
        """Bytes for buckets and message together."""
        return self.buckets + self.message

    def added_peak(self, kept: int, passing: int) -> int:
        """Return bytes added to backward's peak: when a bucket is sent late, layers have freed much by then."""
        gone = (1 - self.kept_share) * kept
        if not self.kept_share:
            gone += passing
        return max(self.buckets, self.within_backward - int(gone))


@dataclass(frozen=True, kw_only=True)
class PartitionBytes:
    """Device bytes between two steps, and additional bytes within a step."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    """Full weights that ZeRO 3 gathers at once, at most."""
    reduction: Reduction

    def in_step(self, *, kept: int, passing: int, **others: int) -> StepBytes:
        """Return a step's bytes, given ``kept`` and ``passing`` bytes; ``others`` are ``StepBytes`` fields."""
        return StepBytes(
            weights=self.weights,
            gradients=self.gradients,
            optimizer=self.optimizer,
            gathered=self.gathered,
            reduction=self.reduction.added_peak(kept, passing),
            after_backward=self.reduction.after_backward,
            kept=kept,
            passing=passing,
            **others,
        )


def partition_bytes(config: ResolvedConfig, module: nn.Module, mesh: Mesh, device: str = "cuda") -> PartitionBytes:
    """Return a rank's bytes under the config's ZeRO stage, on this ``device`` type.

    ``module`` has this rank's parameters before ZeRO as it stores them: full ones, and only its own experts.
    """
    memory = memory_of_rank(config, config.model.config(), mesh.world_size)
    weights = memory.weights
    whole = sum(_stored_bytes(p, config) for p in module.parameters())
    if config.zero.stage != 3:
        # Below stage 3, a rank holds all weights in the traced module.
        weights = whole
    weights += sum(b.numel() for b in module.buffers()) * config.dtype.itemsize
    parameters = {name: p.shape for name, p in module.named_parameters()}
    experts = {name for name in parameters if mesh.expert > 1 and is_expert_weight(name)}
    gathered = 0
    if config.zero.stage == 3:
        sizes = {name: _stored_bytes(p, config) for name, p in module.named_parameters()}
        gathered = _gathered(config, sizes, experts, mesh)
    trained = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
    return PartitionBytes(
        weights=weights - memory.weights_offloaded,
        gradients=memory.gradients - memory.gradients_offloaded,
        optimizer=memory.optimizer - memory.optimizer_offloaded,
        gathered=gathered,
        reduction=reduction_bytes(config, trained, experts, world_size=mesh.world_size, device=device),
    )


def _stored_bytes(p: nn.Parameter, config: ResolvedConfig) -> int:
    """Return a parameter's bytes in a run: in its dtype, unless it is quantized."""
    width = config.dtype.itemsize
    if not p.is_floating_point():
        width = p.element_size()
    return p.numel() * width


def _gathered(config: ResolvedConfig, sizes: dict[str, int], experts: set[str], mesh: Mesh) -> int:
    """Return the most bytes of gathered weights in ZeRO 3, given each parameter's bytes.

    A rank's own partition is stored separately.
    """
    width = config.dtype.itemsize
    if mesh.expert == mesh.world_size:
        # No other rank holds these experts, so they are never gathered.
        sizes = {name: size for name, size in sizes.items() if name not in experts}
    whole = sum(sizes.values())
    live = min(whole, config.zero.max_live_parameters * width)
    # Gathered weights are received by rank, then copied into parameters.
    received = min(whole, max(config.zero.prefetch_bucket_size * width, *sizes.values()))
    if config.train.chunk_tokens:
        # With chunks, a block's weights are all gathered together.
        of_layers: Counter[str] = Counter()
        for name, size in sizes.items():
            layer = _layer_of(name)
            if layer:
                of_layers[layer] += size
        largest = max(of_layers.values())
        live, received = max(live, largest), max(received, largest)
    return live + received


def reduction_bytes(
    config: ResolvedConfig, parameters: Mapping[str, torch.Size], experts: Set[str], *, world_size: int, device: str
) -> Reduction:
    """Return reduction bytes under the config's ZeRO stage on a ``device`` ("cuda", "cpu") with ``parameters``.

    ``experts`` names the parameters that fewer ranks share, which are reduced separately.
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
    # A tensor larger than a bucket is reduced alone.
    values = max(min(bucket, sum(sizes.values())), *sizes.values())
    if stage == 3:
        # The bucket is permanent; its partitions, padded for the message, are two copies.
        return Reduction(
            buckets=bucket * FLOAT32, message=2 * values * FLOAT32, kept_share=kept_share, after_backward=0
        )
    means = 0
    if config.dtype == torch.float32 and (stage == 1 or config.accumulation(world_size) > 1):
        # This rank's partition of the mean is held in addition to the sum over micro-batches.
        means = -(-num_trained_of_all(config) // world_size) * FLOAT32
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
    """Return message bytes in stages 1 and 2 for this many ``values``."""
    # A gradient waits for its bucket. Bucket slices for one rank are concatenated and sent in float32.
    message = 2 * values * width
    if width != FLOAT32:
        # The float32 copy. Two more gradients have been observed alive then; DeepSpeed's source does not explain them.
        message += (2 * width + FLOAT32) * values
    return message


def _kept_share(sizes: Mapping[str, int], bucket: int) -> float:
    """Return the share of layers with unfinished backward when gradients first exceed a ``bucket``."""
    # Forward order: the encoder's layers come before the decoder's, after the table that both look up.
    names = sorted(sizes, key=lambda name: (not name.startswith("model.embed"), not name.startswith("encoder.")))
    numbers = {layer: number for number, layer in enumerate(dict.fromkeys(filter(None, map(_layer_of, names))))}
    num_layers = max(1, len(numbers))
    filled, share = 0, 1.0
    for name in reversed(names):
        layer = _layer_of(name)
        filled += sizes[name]
        if layer:
            share = (numbers[layer] + 1) / num_layers
        elif share < 1:
            share = 0.0  # embeddings, after the first layer in backward
        if filled > bucket:
            return share
    return 0.0


def _layer_of(name: str) -> str:
    """Return a tensor's layer, prefixed with its stack's name; empty if it belongs to no layer."""
    stack, layers, suffix = name.partition(".layers.")
    if not layers:
        stack, layers, suffix = name.partition(".mtp.")
    if not layers:
        return ""
    return f"{stack}{layers}{suffix.partition('.')[0]}"

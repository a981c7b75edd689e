"""``estimate_run``: a run's bytes and seconds before it starts, by arithmetic, for each kind of rank."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

from launcher.config.config_sections import RunConfig
from launcher.config.data_section import DataSection
from launcher.config.image_objective import complete_images
from launcher.config.resolve import Data, TargetMachine, resolve, resolve_without_data
from launcher.config.resolved import ResolvedConfig, ResolvedParallel, ResolvedTrain
from launcher.config.run_config_rules import check_run
from launcher.config.tokens_per_rank_rules import C, padded_documents, padded_tokens, with_context
from launcher.config.zero_section import zero_options
from launcher.metrics.throughput import training_flops
from launcher.plan.activations import Activations, activations
from launcher.plan.encoder import source_documents
from launcher.plan.hardware import Hardware
from launcher.plan.memory_estimate import FLOAT32, checkpoint_copy_bytes, memory_of_rank
from launcher.plan.parameters import build_stored, planned_mesh
from launcher.plan.planned_world import RankKind, World, rank_kinds
from launcher.plan.seconds import StepSeconds, slowest, step_seconds
from launcher.plan.synthetic_documents import document_length, uniform_documents
from launcher.plan.zero_bytes import PartitionBytes, StepBytes, partition_bytes
from longctx.architecture.layer_specs import mixers_of
from longctx.architecture.mixers.softmax_mixer import attended_pairs
from longctx.batch import PackedDocuments
from longctx.errors import ConfigError
from longctx.kernels.processor import has_native_bfloat16
from parallel.zero.zero_options import check_device

HEADROOM = 0.1
"""Share of device memory left to NCCL's buffers, kernel workspaces (attention's in backward is counted) and allocator
gaps."""
_MOST_TOKENS = 1 << 40
"""Longest row to search for."""


@dataclass(frozen=True, kw_only=True)
class RankEstimate:
    """One step's estimate for one kind of rank."""

    kind: RankKind
    bytes: StepBytes
    seconds: StepSeconds


@dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """A run's estimate on this hardware."""

    config: ResolvedConfig
    world: World
    document_tokens: int
    hardware: Hardware
    ranks: list[RankEstimate]
    host_bytes: int
    """Host memory per rank for offloaded or stored data."""
    copy_bytes: int
    """Additional host memory for a checkpoint copy while it is written, on the rank that copies most. A run without it
    waits for its saves, so ``fits`` ignores it."""
    model_flops: float
    """FLOPs per step with the mask applied, as for ``mfu`` in metrics.jsonl."""
    full_flops: float
    """FLOPs per step if every query attended to every key in its document."""

    @property
    def peak_bytes(self) -> int:
        """Largest peak on any rank's device."""
        return max(rank.bytes.peak for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """True if every rank fits into its device memory and its portion of host memory."""
        return self.peak_bytes <= self.hardware.memory_bytes and self.host_bytes <= self.hardware.host_memory_bytes

    @property
    def seconds(self) -> StepSeconds:
        """Step seconds on the slowest rank."""
        return slowest([rank.seconds for rank in self.ranks])

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all ranks."""
        return self.config.train.tokens_per_step / self.seconds.total

    @property
    def images_per_step(self) -> int:
        """Images per step over all ranks, as many as fit into the rows; 0 for texts."""
        image = self.config.model.image
        if not image.is_used:
            return 0
        return self.config.rows_per_step * (self.config.data.seq_len // image.num_tokens)

    @property
    def run_hours(self) -> float:
        """Hours for all steps, excluding validation and checkpoints."""
        return self.config.train.steps * self.seconds.total / 3600

    def utilisation(self, flops: float) -> float | None:
        """Return ``flops`` per step as a share of the devices' peak; None if the peak is unknown."""
        if not self.hardware.peak_flops:
            return None
        return flops / (self.seconds.total * self.hardware.peak_flops * self.world.ranks)

    def _image_rates(self) -> dict[str, float]:
        if not self.images_per_step:
            return {}
        rate = self.images_per_step / self.seconds.total
        return {"images_per_step": self.images_per_step, "images_per_second": rate}

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as plain values."""
        return {
            "config": dataclasses.asdict(self.config),
            "world": dataclasses.asdict(self.world),
            "document_tokens": self.document_tokens,
            "hardware": self.hardware.to_json(),
            "peak_bytes": self.peak_bytes,
            "host_bytes": self.host_bytes,
            "copy_bytes": self.copy_bytes,
            "fits": self.fits,
            "step_seconds": self.seconds.total,
            "tokens_per_second": self.tokens_per_second,
            **self._image_rates(),
            "run_hours": self.run_hours,
            "device_hours": self.run_hours * self.world.ranks,
            "mfu": self.utilisation(self.model_flops),
            "mfu_full_attention": self.utilisation(self.full_flops),
            "ranks": [
                {
                    "rank": rank.kind.rank,
                    "kind": rank.kind.describe(),
                    "bytes": dataclasses.asdict(rank.bytes) | {"held": rank.bytes.held, "peak": rank.bytes.peak},
                    "seconds": dataclasses.asdict(rank.seconds) | {"total": rank.seconds.total},
                }
                for rank in self.ranks
            ],
        }


def planned(
    requested: RunConfig, world: World, hardware: Hardware, *, document_tokens: int = 0, device_type: str = ""
) -> ResolvedConfig:
    """Resolve the config as a run on these ranks would do; raise ConfigError if the run would be rejected.

    ``device_type`` defaults to the hardware's.
    """
    device_type = device_type or hardware.device_type
    machine = TargetMachine(
        ranks=world.ranks,
        device_type=device_type,
        # A CPU is assumed to be this machine's, or a similar one.
        native_bfloat16=device_type == "cuda" or has_native_bfloat16(),
        fits=lambda one: fits(one, world, hardware, share=1 - HEADROOM, document_tokens=document_tokens),
    )
    resolved = resolve_without_data(requested, machine)
    check_run(resolved, world.ranks)
    # An image may be shorter than a row.
    is_packed = document_length(requested, document_tokens) % requested.data.seq_len > 0
    config = resolve(resolved, machine, Data(is_packed=is_packed))
    check_device(zero_options(config.zero), device_type)
    return config


def estimate_run(requested: RunConfig, world: World, hardware: Hardware, *, document_tokens: int = 0) -> RunEstimate:
    """Estimate the run; raise ConfigError if it would be rejected. Starts no processes and reads no data."""
    config = planned(requested, world, hardware, document_tokens=document_tokens)
    model = config.model.config()
    documents = uniform_documents(config, document_tokens)
    padded = padded_documents(config, documents)
    ranks, host_bytes = estimate_ranks(config, world, hardware, padded)
    # ``documents`` is the largest micro-batch; with tokens_per_rank others may have one row less.
    copies = config.train.tokens_per_step / documents.num_tokens
    of_sources: tuple[int, ...] = ()
    if model.encoder_layers:
        of_sources = source_documents(config, documents.num_documents).lengths
    flops = training_flops(model, documents.lengths, of_sources, head_share=config.head_share) * copies
    return RunEstimate(
        config=config,
        world=world,
        document_tokens=document_tokens,
        hardware=hardware,
        ranks=ranks,
        host_bytes=host_bytes,
        copy_bytes=checkpoint_copy_bytes(config, world),
        model_flops=flops,
        full_flops=flops + _masked_flops(config, documents.lengths) * copies,
    )


def estimate_ranks(
    config: ResolvedConfig, world: World, hardware: Hardware, documents: PackedDocuments
) -> tuple[list[RankEstimate], int]:
    """Estimate each kind of rank, and host bytes per rank, for a resolved ``config`` and one micro-batch's
    ``documents``.
    """
    device_type = hardware.device_type
    memory = memory_of_rank(config, config.model.config(), world.ranks)
    passing = _activations(config, device_type, len(documents.lengths))
    of_bytes = _bytes(config, world, passing, hardware)
    ranks = [
        RankEstimate(
            kind=kind,
            bytes=of_bytes,
            seconds=step_seconds(config, world, kind, documents, memory, passing, hardware),
        )
        for kind in rank_kinds(config)
    ]
    return ranks, _host_bytes(config, world, passing, device_type)


def max_row_tokens(config: ResolvedConfig, world: World, hardware: Hardware, *, share: float = 1.0) -> int:
    """Return the longest row, in multiples of 128 tokens per rank, that fits into a share of device memory; 0 if none
    fits. Windows of images need complete images instead.

    ``config`` is resolved, as in ``estimate_run``.
    """
    unit = 128 * config.parallel.context
    if config.model.image.window:
        unit = complete_images(config)

    def is_possible(units: int) -> bool:
        try:
            longer = with_context(with_rows(config, units * unit), world.ranks)
        except ConfigError:
            return False  # more tokens than parallel.tokens_per_rank allows
        return fits(longer, world, hardware, share=share)

    # Assume that any row shorter than one that fits also fits: double the length, then bisect between the last success
    # and the first failure.
    if not is_possible(1):
        return 0
    low, high = 1, 2
    while low * unit <= _MOST_TOKENS and is_possible(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if is_possible(middle):
            low = middle
        else:
            high = middle
    return low * unit


def fits(
    config: ResolvedConfig, world: World, hardware: Hardware, *, share: float = 1.0, document_tokens: int = 0
) -> bool:
    """Return True if a resolved run fits into a share of device memory, and into host memory."""
    passing = _activations(config, hardware.device_type, len(uniform_documents(config, document_tokens).lengths))
    if _host_bytes(config, world, passing, hardware.device_type) > hardware.host_memory_bytes:
        return False
    return _bytes(config, world, passing, hardware).peak <= share * hardware.memory_bytes


def peak_bytes(config: ResolvedConfig, world: World, hardware: Hardware) -> int:
    """Return a rank's peak device bytes in one step of a resolved run."""
    passing = _activations(config, hardware.device_type, config.train.micro_batch_rows)
    return _bytes(config, world, passing, hardware).peak


def with_rows(config: C, seq_len: int) -> C:
    """Return the config with another row length, and the same number of rows per step."""
    longer = config.changed({"data.seq_len": seq_len, "train.tokens_per_step": config.rows_per_step * seq_len})
    if config.parallel.tokens_per_rank:
        # The number of rows in a micro-batch depends on their length.
        return longer.changed({"train.micro_batch_rows": 1})
    return longer


def _host_bytes(config: ResolvedConfig, world: World, passing: Activations, device_type: str) -> int:
    """Return host bytes per rank; 0 if host and device memory are the same."""
    if device_type == "cpu":
        return 0
    return _stored_bytes(config, world, passing)


def _stored_bytes(config: ResolvedConfig, world: World, passing: Activations) -> int:
    """Return bytes per rank that are offloaded to, or stored in, host memory."""
    memory = memory_of_rank(config, config.model.config(), world.ranks)
    startup_bytes = 0
    if config.train.store == "host":
        # Activations that the check at startup already counts.
        startup_bytes = memory.activations
    return memory.host + max(0, passing.kept_on_host - startup_bytes)


def _activations(config: ResolvedConfig, device_type: str, num_documents: int) -> Activations:
    parallel = config.parallel
    tokens = padded_tokens(config, config.data.seq_len * config.train.micro_batch_rows) // parallel.context
    ring = parallel.context // parallel.ulysses
    return activations(config, tokens, ring=ring, device_type=device_type, num_documents=num_documents)


def _bytes(config: ResolvedConfig, world: World, passing: Activations, hardware: Hardware) -> StepBytes:
    held = _held(_without_rows(config, world), world, hardware.device_type)
    kept, kept_on_host, process, update_bytes = passing.kept, passing.kept_on_host, 0, 0
    if hardware.device_type == "cpu":
        # On a CPU, device memory is host memory.
        kept, kept_on_host, process = kept + _stored_bytes(config, world, passing), 0, int(hardware.process_bytes)
        # AdamW's plain form computes its denominator in two steps, each as large as a moment.
        update_bytes = 2 * FLOAT32 * memory_of_rank(config, config.model.config(), world.ranks).updated
    return held.in_step(
        kept=kept,
        passing=passing.passing,
        kept_on_host=kept_on_host,
        kept_on_disk=passing.kept_on_disk,
        optimizer_step=update_bytes,
        process=process,
    )


@cache
def _held(config: ResolvedConfig, world: World, device_type: str) -> PartitionBytes:
    """Return the bytes that do not depend on rows; cached, because a search repeats the same requests."""
    return partition_bytes(config, build_stored(config), planned_mesh(config, world), device_type)


def _without_rows(config: ResolvedConfig, world: World) -> ResolvedConfig:
    """Reset the config to defaults, except for fields that determine weights, gradients and optimizer."""
    # The same number of micro-batches per step, with one token each: gradient accumulation depends on it.
    micro_batches = config.accumulation(world.ranks) * (world.ranks // config.parallel.context)
    train = ResolvedTrain(
        dtype=config.train.dtype,
        products=config.train.products,
        chunk_tokens=min(config.train.chunk_tokens, 1),
        tokens_per_step=micro_batches,
        optimizer=config.train.optimizer,
    )
    parallel = ResolvedParallel(
        context=config.parallel.context, ulysses=config.parallel.ulysses, expert=config.parallel.expert
    )
    data = DataSection(seq_len=1)
    return ResolvedConfig(model=config.model, data=data, train=train, parallel=parallel, zero=config.zero)


def _masked_flops(config: ResolvedConfig, lengths: tuple[int, ...]) -> float:
    """Return FLOPs, forward and backward, for query-key pairs hidden by the causal masks in full layers."""
    model = config.model.config()
    if not model.causal:
        return 0.0
    full = sum(count for mixer, count in mixers_of(model).items() if mixer.lookback_tokens is None and not mixer.stride)
    left_out = sum(n * n for n in lengths) - attended_pairs(lengths)
    # Backward counts as twice the forward matmuls, hence the factor 3.
    return 3.0 * full * 2 * model.num_heads * (model.head_dim + model.value_dim) * left_out

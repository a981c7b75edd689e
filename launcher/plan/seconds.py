"""Seconds per step on one rank, part by part, from its computation, its communication, and its hardware's rates.

Work that overlaps computation counts only for the time by which it is longer: a hop during attention, a copy during its
layer, a reduction during backward. Ranks that share their cores hide less, by the hardware's ``hidden_share``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb, sqrt

from launcher.config.resolved import ResolvedConfig
from launcher.plan.activations import Activations
from launcher.plan.attention_cost import Attention, AttentionWork, attention_of_rank, join_work, merging_of_rank
from launcher.plan.compute_cost import elementwise_seconds, matmul_seconds
from launcher.plan.encoder import encoder_run, source_documents
from launcher.plan.hardware import Hardware
from launcher.plan.memory_estimate import Memory
from launcher.plan.muon_cost import muon_seconds
from launcher.plan.parameters import num_parameters, num_trained
from launcher.plan.planned_world import RankKind, World
from launcher.plan.rates import Rate
from launcher.plan.stages import stage_documents, stage_runs
from launcher.plan.workspace import expected_kernel
from longctx.batch import PackedDocuments
from longctx.config import ModelConfig

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """Seconds per step on one rank, by part."""

    products: float
    """Weight matmuls: forward, backward, and recomputation."""
    attention: float
    elementwise: float
    """Norms, activations, sums, the loss between its matmuls."""
    hops: float
    """Waiting for keys and values, or their gradients."""
    all_to_alls: float
    """Ulysses head exchanges, and expert dispatch and combine."""
    moves: float
    """Waiting for activations that train.store offloads."""
    zero: float
    """Waiting for gradient reduction and weight gathering."""
    optimizer: float
    host: float
    """Launching operators and bookkeeping, if no device work hides them."""

    @property
    def total(self) -> float:
        """Seconds for the full step."""
        return sum(dataclasses.asdict(self).values())


def step_seconds(
    config: ResolvedConfig,
    world: World,
    kind: RankKind,
    documents: PackedDocuments,
    memory: Memory,
    activations: Activations,
    hardware: Hardware,
) -> StepSeconds:
    """Estimate a rank's seconds per step; ``config`` is fully resolved."""
    model, accumulation = config.model.config(), config.accumulation(world.ranks)
    # Count in micro-batches like this one, the largest: with tokens_per_rank others may have one row less.
    of_rank = config.rows_per_step * config.parallel.context / world.ranks
    micro_batches = of_rank / config.train.micro_batch_rows
    tokens = documents.num_tokens // config.parallel.context
    forwards = _forwards(config)
    matmuls = matmul_seconds(config, tokens, hardware)
    attention = attention_of_stages(config, world, kind.rank, documents)
    kernel = expected_kernel(config, hardware.device_type)
    forward, backward = attention.seconds(model, config.train.dtype, hardware, kernel)
    elementwise = elementwise_seconds(config, tokens, hardware)
    hops = _waits(attention, forward, hardware, width=1) * forwards
    # Backward transfers keys and values once more, and returns their gradients in float32.
    hops += _waits(attention, backward, hardware, width=1 + _FLOAT32 / config.dtype.itemsize)
    attending = forwards * forward + backward
    encoder = encoder_run(config)
    if encoder is not None:
        encoder_seconds = _encoder_seconds(config, encoder, world, kind, documents, hardware)
        matmuls, elementwise, attending, hops = (
            matmuls + encoder_seconds[0],
            elementwise + encoder_seconds[1],
            attending + encoder_seconds[2],
            hops + encoder_seconds[3],
        )
    all_to_alls = _ulysses_seconds(config, model, world, documents, hardware)
    all_to_alls += _expert_seconds(config, model, world, tokens, hardware)
    compute_seconds = matmuls + attending + elementwise
    host_bandwidth = hardware.host_bandwidth.at()
    moved = 2 * activations.kept_on_host / host_bandwidth
    moved += 2 * activations.kept_on_disk / min(host_bandwidth, hardware.disk_bandwidth.at())
    zero, optimizer = _state_seconds(config, world, accumulation, memory, micro_batches * compute_seconds / 2, hardware)
    return StepSeconds(
        products=micro_batches * matmuls,
        attention=micro_batches * attending,
        elementwise=micro_batches * elementwise,
        hops=micro_batches * hops,
        all_to_alls=micro_batches * all_to_alls,
        moves=micro_batches * _waited(moved, compute_seconds, hardware),
        zero=zero,
        optimizer=optimizer,
        host=_host_seconds(config, tokens, accumulation, hardware),
    )


def attention_of_stages(config: ResolvedConfig, world: World, rank: int, documents: PackedDocuments) -> Attention:
    """Count a rank's attention work in one forward pass, over all stages of a hierarchical image model.

    Between stages, patches move to the ranks that merge them. The way from the batch's layout into windows, once per
    pass, is not counted.
    """
    width, models = config.dtype.itemsize, [stage.model.config() for stage in stage_runs(config)]
    parts = []
    for model, of_stage in zip(models, stage_documents(config, documents), strict=True):
        parts.append(attention_of_rank(model, config.parallel, width, world, rank, of_stage))
    images = documents.num_tokens // max(1, config.model.image.num_tokens)
    for model, following in pairwise(models):
        parts.append(merging_of_rank(model, following, config.parallel, width, world, rank, images))
    return join_work(parts)


def _encoder_seconds(
    config: ResolvedConfig,
    encoder: ResolvedConfig,
    world: World,
    kind: RankKind,
    documents: PackedDocuments,
    hardware: Hardware,
) -> tuple[float, float, float, float]:
    """Return (matmul, elementwise, attention, hop) seconds for encoder and cross attention in a micro-batch."""
    sources = source_documents(config, documents.num_documents)
    tokens, forwards = sources.num_tokens // config.parallel.context, _forwards(config)
    model, kernel = encoder.model.config(), expected_kernel(encoder, hardware.device_type)
    attention = attention_of_rank(model, encoder.parallel, encoder.dtype.itemsize, world, kind.rank, sources)
    forward, backward = attention.seconds(model, encoder.train.dtype, hardware, kernel)
    hops = _waits(attention, forward, hardware, width=1) * forwards
    hops += _waits(attention, backward, hardware, width=1 + _FLOAT32 / encoder.dtype.itemsize)
    # All pairs between a document's tokens and its source's, shared evenly among ranks.
    pairs = sum(n * s for n, s in zip(documents.lengths, sources.lengths, strict=True)) / config.parallel.context
    each = sqrt(pairs / max(1, documents.num_documents))
    flops = 4.0 * config.model.num_layers * model.num_heads * model.head_dim * pairs
    crossed = Attention({AttentionWork("full", each): flops}).seconds(model, encoder.train.dtype, hardware, kernel)
    return (
        matmul_seconds(encoder, tokens, hardware, has_head=False),
        elementwise_seconds(encoder, tokens, hardware, has_head=False),
        forwards * (forward + crossed[0]) + backward + crossed[1],
        hops,
    )


def _forwards(config: ResolvedConfig) -> int:
    if config.train.keep == "inputs":
        return 2
    return 1


def _waited(transfer_seconds: float, compute_seconds: float, hardware: Hardware) -> float:
    """Return the seconds that ``transfer_seconds`` adds to the computation that it overlaps."""
    hidden = hardware.hidden_share * transfer_seconds
    return transfer_seconds - hidden + max(0.0, hidden - compute_seconds)


def _waits(attention: Attention, compute_seconds: float, hardware: Hardware, *, width: float) -> float:
    """Return a pass's hop seconds beyond the computation that they overlap."""
    if not attention.messages:
        return 0.0
    a_message = width * (attention.received_in_node + attention.received_from_afar) / attention.messages
    within = width * attention.received_in_node / hardware.node_bandwidth.at(bytes=max(1.0, a_message))
    afar = width * attention.received_from_afar / hardware.network_bandwidth.at(bytes=max(1.0, a_message))
    return _waited(max(within, afar) + attention.messages * hardware.message_seconds, compute_seconds, hardware)


def _host_seconds(config: ResolvedConfig, tokens: int, micro_batches: float, hardware: Hardware) -> float:
    chunks, again = 1, 0.0
    if config.train.chunk_tokens:
        chunks = -(-tokens // config.train.chunk_tokens)
    if config.train.keep != "all" or config.train.chunk_tokens:
        # Recomputation repeats forward, a third of these seconds; backward is the other two thirds.
        again = 1 / 3
    of_layer, of_micro_batch, of_step = (
        _of_stage(rate, config)
        for rate in (hardware.layer_seconds, hardware.micro_batch_seconds, hardware.step_seconds)
    )
    layers = config.model.config().depth * chunks * (1 + again) * of_layer
    return micro_batches * (layers + of_micro_batch) + of_step


def _of_stage(seconds: Rate | None, config: ResolvedConfig) -> float:
    """Return measured seconds for the run's ZeRO stage; 0 if it was not measured."""
    if seconds is None:
        return 0.0
    return seconds.at(config.train.dtype, stage=config.zero.stage + 1)


# ------------------------------------------------------------------------------------------------------------ messages


def _ulysses_seconds(
    config: ResolvedConfig, model: ModelConfig, world: World, documents: PackedDocuments, hardware: Hardware
) -> float:
    """Return seconds for exchanging heads for rows and back: forward, backward, and recomputed projections."""
    ulysses = config.parallel.ulysses
    # Windows are divided between all ranks, and no heads.
    if ulysses == 1 or model.image.window:
        return 0.0
    tokens = documents.num_tokens // config.parallel.context
    row = model.num_heads * (model.head_dim + model.value_dim) + 2 * model.num_kv_heads * model.head_dim
    sent = tokens * row * config.dtype.itemsize * (ulysses - 1) / ulysses
    passes = 2
    if config.train.keep != "all" or config.train.chunk_tokens:
        passes = 3
    # Four messages per pass: queries, keys, values, output.
    bandwidth = _exchange_rate(ulysses, world, hardware).at(bytes=max(1.0, sent / 4))
    return model.depth * passes * (sent / bandwidth + 4 * hardware.message_seconds)


def _exchange_rate(ranks: int, world: World, hardware: Hardware) -> Rate:
    """Return the all-to-all rate among this many neighbouring ranks."""
    if ranks > world.ranks_per_node:
        return hardware.network_bandwidth
    return hardware.exchange_bandwidth


def _expert_seconds(config: ResolvedConfig, model: ModelConfig, world: World, tokens: int, hardware: Hardware) -> float:
    """Return seconds for dispatch and combine in both passes, and for a repeated dispatch if its result is unsaved."""
    ranks = config.parallel.expert
    if ranks == 1:
        return 0.0
    experts_per_rank, chosen = model.num_experts // ranks, model.experts_per_token
    # A token is sent once to each rank that has any of its experts: one minus the probability that a rank has none.
    reached = ranks * (1 - comb(model.num_experts - experts_per_rank, chosen) / comb(model.num_experts, chosen))
    sent = tokens * reached * (ranks - 1) / ranks * model.hidden_size * config.dtype.itemsize
    passes = 4
    if config.train.keep != "all" or config.train.recompute_experts == "all":
        passes = 5
    bandwidth = _exchange_rate(ranks, world, hardware).at(bytes=max(1.0, sent))
    layers = sum(map(model.has_experts, range(model.depth)))
    return layers * passes * (sent / bandwidth + hardware.message_seconds)


def _state_seconds(
    config: ResolvedConfig, world: World, micro_batches: int, memory: Memory, compute_seconds: float, hardware: Hardware
) -> tuple[float, float]:
    """Return per step (seconds for moving gradients and weights between ranks, seconds for the update).

    ``compute_seconds`` is backward's seconds, which a reduction can overlap.
    """
    rates = hardware.gradient_parameters, hardware.reduction_parameters, hardware.update_parameters
    orthogonal = muon_seconds(config, world, hardware) if config.train.optimizer == "muon" else 0.0
    if None in rates or config.zero.offload != "none":
        reduce_seconds, gather_seconds = _zero_seconds(config, world, micro_batches, hardware)
        zero = _waited(reduce_seconds, compute_seconds, hardware) + gather_seconds
        return zero, _optimizer_seconds(config, memory, hardware) + orthogonal
    # DeepSpeed's full time per parameter has been measured, with this number of ranks.
    stage, parameters = config.zero.stage + 1, num_trained(config)
    accumulate_seconds, reduce_seconds, update_seconds = (
        parameters / rate.at(config.train.dtype, stage=stage) for rate in rates if rate is not None
    )
    return (micro_batches - 1) * accumulate_seconds + reduce_seconds, update_seconds + orthogonal


def _zero_seconds(config: ResolvedConfig, world: World, micro_batches: int, hardware: Hardware) -> tuple[float, float]:
    """Return per step (reduction and gathering seconds that overlap computation, gathering seconds that do not)."""
    if world.ranks == 1:
        return 0.0, 0.0
    share, width = (world.ranks - 1) / world.ranks, config.dtype.itemsize
    parameters, gathered_values = num_trained(config) * share, num_parameters(config) * share
    bandwidth = hardware.node_bandwidth.at(bytes=max(1.0, parameters * _FLOAT32))
    if world.ranks > world.ranks_per_node:
        # All devices in a machine share its traffic to other machines.
        bandwidth = min(bandwidth, world.ranks_per_node * hardware.network_bandwidth.at(bytes=parameters * _FLOAT32))
    stage = config.zero.stage
    if stage == 3:
        gathered = 2 * micro_batches * gathered_values * width
        return (micro_batches * parameters * _FLOAT32 + gathered) / bandwidth, 0.0
    # Stage 2 reduces every micro-batch, others once a step; stage 0 gathers its reduced gradients, in float32.
    reductions = 1
    if stage == 2:
        reductions = micro_batches
    after = parameters * width
    if stage == 0:
        after = parameters * _FLOAT32
    return reductions * parameters * _FLOAT32 / bandwidth, after / bandwidth


def _optimizer_seconds(config: ResolvedConfig, memory: Memory, hardware: Hardware) -> float:
    """Return seconds for AdamW, which reads master, moments and gradient, and writes master, moments and weight.

    Muon has one moment less, and reads as much again for its matmuls (``muon_seconds``).
    """
    values = memory.updated
    bandwidth = hardware.memory_bandwidth.at(config.train.dtype, bytes=max(1.0, values * _FLOAT32))
    seconds = 0.0
    if config.zero.offload != "none":
        bandwidth = hardware.host_memory_bandwidth.at()
        seconds = values * (_FLOAT32 + config.dtype.itemsize) / hardware.host_bandwidth.at()
    if config.zero.offload == "nvme":
        # Master and both moments, read and written.
        seconds += 6 * values * _FLOAT32 / hardware.disk_bandwidth.at()
    # Four float32 values are read and three written, plus the weight in its dtype.
    return seconds + values * (7 * _FLOAT32 + config.dtype.itemsize) / bandwidth


def slowest(seconds: Sequence[StepSeconds]) -> StepSeconds:
    """Return the slowest rank's seconds: all others wait for it."""
    return max(seconds, key=lambda of_rank: of_rank.total)

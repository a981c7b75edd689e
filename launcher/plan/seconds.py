"""Seconds of one step of one rank, part by part, from what a rank computes and moves and how fast its hardware is.

What runs beside computation counts where it takes longer than that: a hop behind attention, a copy behind its layer, a
reduction behind backward.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import comb

from launcher.config.sections import ParallelSection, RunConfig
from launcher.metrics.throughput import attention_flops, matmul_parameters
from launcher.plan.activations import Activations
from launcher.plan.hardware import Hardware
from launcher.plan.memory import Memory
from launcher.plan.parameters import num_layer_parameters, num_parameters
from launcher.plan.world import RankKind, World
from longctx.batch import PackedDocuments
from longctx.config import ModelConfig
from parallel.layout.sequence import SequenceLayout
from parallel.schedule.heads import AttentionShape
from parallel.schedule.schedule import Schedule

BACKWARD_OF_ATTENTION = 2.5
"""Its five products over forward's two."""
_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """One step of one rank."""

    products: float
    """Of weights: forward, backward, and what is computed again."""
    attention: float
    elementwise: float
    """Norms, activations, sums, the loss between its products."""
    hops: float
    """Waiting for keys and values, or their gradients."""
    all_to_alls: float
    """Heads of Ulysses, tokens of experts."""
    moves: float
    """Waiting for what train.store keeps elsewhere."""
    zero: float
    """Waiting for gradients to be reduced and weights to be gathered."""
    optimizer: float

    @property
    def total(self) -> float:
        """Of the whole step."""
        return sum(dataclasses.asdict(self).values())


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """One forward pass of all layers on a rank."""

    flops: float = 0.0
    received_in_node: float = 0.0
    received_from_afar: float = 0.0
    messages: int = 0

    def __add__(self, other: _Attention) -> _Attention:
        mine, others = dataclasses.asdict(self), dataclasses.asdict(other)
        return _Attention(**{name: mine[name] + others[name] for name in mine})


def step_seconds(
    config: RunConfig,
    world: World,
    kind: RankKind,
    documents: PackedDocuments,
    memory: Memory,
    activations: Activations,
    hardware: Hardware,
) -> StepSeconds:
    """What a step takes a rank; ``config`` has nothing left to the machine."""
    model, accumulation = config.model.config(), config.accumulation(world.ranks)
    # Counted in micro-batches like this one, the largest: with tokens_per_rank others may have a row less.
    of_rank = config.rows_per_step * config.parallel.context / world.ranks
    micro_batches = of_rank / config.train.micro_batch_rows
    tokens = documents.num_tokens // config.parallel.context
    forwards = _forwards(config)
    products = _product_flops(config, model, tokens) / hardware.product_flops
    attention = _attention(model, config.parallel, config.dtype.itemsize, world, kind.rank, documents)
    forward = attention.flops / hardware.attention_flops
    backward = BACKWARD_OF_ATTENTION * attention.flops / hardware.attention_backward_flops
    elementwise = _elementwise_bytes(config, model, tokens) / hardware.memory_bandwidth
    hops = _waits(attention, forward, hardware, width=1) * forwards
    # Keys and values once more, and their gradients in float32 on the way back.
    hops += _waits(attention, backward, hardware, width=1 + _FLOAT32 / config.dtype.itemsize)
    attending = forwards * forward + backward
    all_to_alls = _ulysses_seconds(config, model, world, documents, hardware)
    all_to_alls += _expert_seconds(config, model, world, tokens, hardware)
    computing = products + attending + elementwise
    moved = 2 * activations.kept_on_host / hardware.host_bandwidth
    moved += 2 * activations.kept_on_disk / min(hardware.host_bandwidth, hardware.disk_bandwidth)
    reducing, gathering = _zero_seconds(config, world, accumulation, hardware)
    return StepSeconds(
        products=micro_batches * products,
        attention=micro_batches * attending,
        elementwise=micro_batches * elementwise,
        hops=micro_batches * hops,
        all_to_alls=micro_batches * all_to_alls,
        moves=micro_batches * max(0.0, moved - computing),
        zero=max(0.0, reducing - micro_batches * computing / 2) + gathering,
        optimizer=_optimizer_seconds(config, memory, hardware),
    )


def _forwards(config: RunConfig) -> int:
    """How often attention goes forward."""
    if config.train.keep == "inputs":
        return 2
    return 1


def _product_flops(config: RunConfig, model: ModelConfig, tokens: int) -> float:
    """Of one micro-batch: 2 a weight and token forward, 4 backward, 2 for those that are computed again."""
    weights = matmul_parameters(model)
    again = 0
    if config.train.keep != "all" or config.train.chunk_tokens:
        # Never the head, nor the last product of a layer, whose result no backward reads.
        again = weights - model.vocab_size * model.hidden_size - _last_products(model)
    return 2.0 * tokens * (3 * weights + again)


def _last_products(model: ModelConfig) -> int:
    """Weights behind the activations of dense FFNs."""
    dense = sum(not model.has_experts(layer) for layer in range(model.num_layers))
    return dense * model.hidden_size * model.ffn_size


def _elementwise_bytes(config: RunConfig, model: ModelConfig, tokens: int) -> float:
    """Bytes that are read and written beside products and attention, forward, backward and again."""
    heads = model.num_heads * model.head_dim + model.num_kv_heads * (model.head_dim + model.value_dim)
    inner = 0
    for layer in range(model.num_layers):
        width = model.ffn_size
        if model.has_experts(layer):
            # Chosen experts' inner values; tokens are gathered and summed, there and back.
            width = model.experts_per_token * model.expert_ffn_size + model.shared_ffn_size
            inner += 4 * model.experts_per_token * model.hidden_size
        inner += 3 * width
    # Two norms (read, write) and two sums (read two, write one) a layer; rotation reads and writes heads.
    values = model.num_layers * (10 * model.hidden_size + 2 * heads) + inner
    passes = 3
    if config.train.keep != "all" or config.train.chunk_tokens:
        passes = 4
    # Logits: five passes in float32.
    moved = tokens * (passes * values * config.dtype.itemsize + 5.0 * _FLOAT32 * model.vocab_size)
    if config.train.chunk_tokens:
        # Each chunk's gradients of weights: written, read, and added to a float32 sum.
        chunks = -(-tokens // config.train.chunk_tokens)
        moved += chunks * num_layer_parameters(config) * (2.0 * config.dtype.itemsize + 2 * _FLOAT32)
    return moved


# ----------------------------------------------------------------------------------------------------------- attention


@cache
def _attention(
    model: ModelConfig, parallel: ParallelSection, width: int, world: World, rank: int, documents: PackedDocuments
) -> _Attention:
    """What a rank computes and receives in all layers, forward. ``width``: bytes of a value."""
    layers = Counter(model.layer_kind(layer) for layer in range(model.num_layers))
    total = _Attention()
    for of_kind, count in layers.items():
        one = _one_layer(model, of_kind, parallel, width, world, rank, documents)
        for _ in range(count):
            total = total + one
    return total


def _one_layer(
    model: ModelConfig,
    of_kind: str,
    parallel: ParallelSection,
    width: int,
    world: World,
    rank: int,
    documents: PackedDocuments,
) -> _Attention:
    if parallel.context == 1 or of_kind == "linear":
        # Linear attention sends states, which are small.
        lengths = documents.lengths
        return _Attention(flops=attention_flops(model, of_kind, lengths) / parallel.context)
    schedule = _schedule(model, of_kind, parallel, documents)
    shape = AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, width, value_dim=model.value_dim)
    ring_rank, ring = rank // parallel.ulysses, parallel.context // parallel.ulysses
    ring_in_node = max(1, world.ranks_per_node // parallel.ulysses)
    within, afar = schedule.rows_received(rank), 0
    if ring > ring_in_node:
        within, afar = schedule.rows_by_link(ring_rank, ring_in_node)
    row = model.num_kv_heads / parallel.ulysses * shape.key_and_value_dim * shape.bytes_per_value
    return _Attention(
        flops=schedule.flops(rank, shape),
        received_in_node=within * row,
        received_from_afar=afar * row,
        messages=2 * (ring - 1),
    )


def _schedule(model: ModelConfig, of_kind: str, parallel: ParallelSection, documents: PackedDocuments) -> Schedule:
    layout = SequenceLayout.build(
        parallel.layout, documents.num_tokens, parallel.context, documents, ulysses=parallel.ulysses
    )
    if of_kind == "full":
        return Schedule.build(layout, documents)
    stride = 0
    if of_kind == "sparse":
        stride = model.sparse_stride
    return Schedule.build(layout, documents, window=model.window, stride=stride)


def _waits(attention: _Attention, computing: float, hardware: Hardware, *, width: float) -> float:
    """Seconds of a pass in which hops take longer than the work they run beside."""
    within = width * attention.received_in_node / hardware.node_bandwidth
    afar = width * attention.received_from_afar / hardware.network_bandwidth
    return max(0.0, max(within, afar) + attention.messages * hardware.message_seconds - computing)


# ------------------------------------------------------------------------------------------------------------ messages


def _ulysses_seconds(
    config: RunConfig, model: ModelConfig, world: World, documents: PackedDocuments, hardware: Hardware
) -> float:
    """Heads for rows and back: forward, backward, and once more what is projected again."""
    ulysses = config.parallel.ulysses
    if ulysses == 1:
        return 0.0
    tokens = documents.num_tokens // config.parallel.context
    row = model.num_heads * (model.head_dim + model.value_dim) + 2 * model.num_kv_heads * model.head_dim
    sent = tokens * row * config.dtype.itemsize * (ulysses - 1) / ulysses
    passes = 2
    if config.train.keep != "all" or config.train.chunk_tokens:
        passes = 3
    bandwidth = hardware.node_bandwidth
    if ulysses > world.ranks_per_node:
        bandwidth = hardware.network_bandwidth
    # Four messages a pass: queries, keys, values, output.
    return model.num_layers * passes * (sent / bandwidth + 4 * hardware.message_seconds)


def _expert_seconds(config: RunConfig, model: ModelConfig, world: World, tokens: int, hardware: Hardware) -> float:
    """Tokens to their experts and back, forward and backward, and the way there once more where it is not saved."""
    ranks = config.parallel.expert
    if ranks == 1:
        return 0.0
    here, chosen = model.num_experts // ranks, model.experts_per_token
    # A token is sent once to each rank that has any of its experts.
    reached = ranks * (1 - comb(model.num_experts - here, chosen) / comb(model.num_experts, chosen))
    sent = tokens * reached * (ranks - 1) / ranks * model.hidden_size * config.dtype.itemsize
    passes = 4
    if config.train.keep != "all" or config.train.recompute_experts == "all":
        passes = 5
    bandwidth = hardware.node_bandwidth
    if ranks > world.ranks_per_node:
        bandwidth = hardware.network_bandwidth
    layers = sum(map(model.has_experts, range(model.num_layers)))
    return layers * passes * (sent / bandwidth + hardware.message_seconds)


def _zero_seconds(config: RunConfig, world: World, micro_batches: int, hardware: Hardware) -> tuple[float, float]:
    """(seconds of reducing and gathering beside computation, seconds of gathering that nothing hides) a step."""
    if world.ranks == 1:
        return 0.0, 0.0
    share, width = (world.ranks - 1) / world.ranks, config.dtype.itemsize
    parameters = num_parameters(config) * share
    bandwidth = hardware.node_bandwidth
    if world.ranks > world.ranks_per_node:
        # All devices of a machine carry what crosses.
        bandwidth = min(bandwidth, world.ranks_per_node * hardware.network_bandwidth)
    stage = config.zero_stage
    if stage == 3:
        gathered = 2 * micro_batches * parameters * width
        return (micro_batches * parameters * _FLOAT32 + gathered) / bandwidth, 0.0
    # Stage 2 reduces every micro-batch, the others once a step; stage 0 gathers what it reduced, in float32.
    reductions = 1
    if stage == 2:
        reductions = micro_batches
    after = parameters * width
    if stage == 0:
        after = parameters * _FLOAT32
    return reductions * parameters * _FLOAT32 / bandwidth, after / bandwidth


def _optimizer_seconds(config: RunConfig, memory: Memory, hardware: Hardware) -> float:
    """AdamW reads master, both moments and gradient, and writes all but the last, and the weight."""
    values = memory.moments / (2 * _FLOAT32)
    bandwidth = hardware.memory_bandwidth
    seconds = 0.0
    if config.zero.offload != "none":
        bandwidth = hardware.host_memory_bandwidth
        seconds = values * (_FLOAT32 + config.dtype.itemsize) / hardware.host_bandwidth
    if config.zero.offload == "nvme":
        # Master and both moments there and back.
        seconds += 6 * values * _FLOAT32 / hardware.disk_bandwidth
    return seconds + values * (7 * _FLOAT32 + config.dtype.itemsize) / bandwidth


def slowest(seconds: Sequence[StepSeconds]) -> StepSeconds:
    """The rank that the others wait for."""
    return max(seconds, key=lambda of_rank: of_rank.total)

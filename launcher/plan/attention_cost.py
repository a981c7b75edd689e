"""Attention work per rank and micro-batch over all layers: FLOPs by kind and size, and communication."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from launcher.config.config_sections import ParallelSection
from launcher.plan.hardware import Hardware
from launcher.plan.planned_world import World
from longctx.architecture.layer_specs import mixers_of
from longctx.architecture.mixers.image_window_mixer import ImageWindowMixer
from longctx.architecture.mixers.mixer import Mixer
from longctx.batch import PackedDocuments
from longctx.config import ModelConfig
from longctx.kernels.attention.slices import K_START, K_STOP, LO, OPEN, Q_START, Q_STOP
from longctx.model.attention.image_windows import PatchOrder, window_order
from parallel.attention.context_parallel_image_windows import groups_of_rank, rows_of_rank
from parallel.layout.sequence import SequenceLayout
from parallel.schedule.attention_schedule import Schedule
from parallel.schedule.bands import slice_areas
from parallel.schedule.head_split import AttentionShape

BACKWARD_FLOPS = 2.5
"""Five matmuls in backward over two in forward."""


class AttentionWork(NamedTuple):
    """Kind and size of attention work that runs at one rate."""

    kind: Literal["causal", "full", "window"]
    size: float
    """Tokens per document, the root of queries times keys, or a window."""


@dataclass(frozen=True)
class Attention:
    """One forward pass through all layers on a rank."""

    flops: dict[AttentionWork, float]
    received_in_node: float = 0.0
    received_from_afar: float = 0.0
    messages: int = 0

    def seconds(self, model: ModelConfig, dtype: str, hardware: Hardware, kernel: str) -> tuple[float, float]:
        """Return (forward, backward) seconds on a device with this kernel."""
        forward = backward = 0.0
        for part, flops in self.flops.items():
            kind = {"causal": "", "full": "full_", "window": "window_"}[part.kind]
            names = f"{kind}attention_flops", f"{kind}attention_backward_flops"
            rates = [hardware.attention_rate(name, kernel) for name in names]
            # Pass both sizes: the rate's table uses one of them, and a profile may lack a window table.
            of_pass = [rate.at(dtype, length=part.size, window=part.size, head_dim=model.head_dim) for rate in rates]
            forward += flops / of_pass[0]
            backward += BACKWARD_FLOPS * flops / of_pass[1]
        return forward, backward


@cache
def attention_of_rank(
    model: ModelConfig, parallel: ParallelSection, width: int, world: World, rank: int, documents: PackedDocuments
) -> Attention:
    """Count a rank's attention FLOPs, received bytes and messages in all layers, forward; ``width`` is the itemsize."""
    layers: list[Attention] = []
    for mixer, count in mixers_of(model).items():
        one = _one_layer(model, mixer, parallel, width, world, rank, documents)
        layers += [one] * count
    return join_work(layers)


def join_work(parts: Sequence[Attention]) -> Attention:
    """Return the sum of several passes' work."""
    flops: dict[AttentionWork, float] = {}
    for one in parts:
        for part, of_part in one.flops.items():
            flops[part] = flops.get(part, 0.0) + of_part
    return Attention(
        flops,
        sum(one.received_in_node for one in parts),
        sum(one.received_from_afar for one in parts),
        sum(one.messages for one in parts),
    )


def _one_layer(
    model: ModelConfig,
    mixer: Mixer,
    parallel: ParallelSection,
    width: int,
    world: World,
    rank: int,
    documents: PackedDocuments,
) -> Attention:
    if isinstance(mixer, ImageWindowMixer):
        return _in_windows(model, mixer, parallel, width, world, rank, documents)
    if parallel.context == 1 or mixer.lookback_tokens == 0:
        # The states passed between ranks are small.
        return Attention(_of_documents(model, mixer, documents.lengths, parallel.context))
    schedule = _schedule(mixer, parallel, documents)
    shape = AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, width, value_dim=model.value_dim)
    # A rank that represents the expert group may belong to another sequence.
    rank %= parallel.context
    ring_rank, ring = rank // parallel.ulysses, parallel.context // parallel.ulysses
    ring_in_node = max(1, world.ranks_per_node // parallel.ulysses)
    within, afar = schedule.rows_received(rank), 0
    if ring > ring_in_node:
        within, afar = schedule.rows_by_link(ring_rank, ring_in_node)
    row = model.num_kv_heads / parallel.ulysses * shape.key_and_value_dim * shape.bytes_per_value
    return Attention(
        _of_schedule(mixer, schedule, rank, shape),
        received_in_node=within * row,
        received_from_afar=afar * row,
        messages=2 * (ring - 1),
    )


def _in_windows(
    model: ModelConfig,
    mixer: ImageWindowMixer,
    parallel: ParallelSection,
    width: int,
    world: World,
    rank: int,
    documents: PackedDocuments,
) -> Attention:
    """Count a rank's windows, and the rows that it receives for shifted ones."""
    rank %= parallel.context
    shifted = window_order(mixer, documents.num_tokens // (mixer.rows * mixer.columns))
    windows = groups_of_rank(shifted, rank, parallel.context)
    flops = mixer.flops(model, [len(windows) * shifted.group])
    found = {AttentionWork("window", mixer.side**2): float(flops)}
    if parallel.context == 1 or not mixer.shift:
        return Attention(found)
    # Queries, keys and values move to the shifted windows' ranks, and outputs back.
    plain = replace(shifted, shift=0)
    values = model.num_heads * model.head_dim * width
    in_node, afar = 0.0, 0.0
    for source, target, tensors in ((plain, shifted, 3), (shifted, plain, 1)):
        near, far = _rows_moved(source, target, rank, parallel.context, world.ranks_per_node)
        in_node, afar = in_node + tensors * near * values, afar + tensors * far * values
    return Attention(found, received_in_node=in_node, received_from_afar=afar, messages=2)


def merging_of_rank(
    model: ModelConfig,
    following: ModelConfig,
    parallel: ParallelSection,
    width: int,
    world: World,
    rank: int,
    images: int,
) -> Attention:
    """Count the rows that a rank receives when a stage's patches are merged for the ``following`` stage."""
    if parallel.context == 1:
        return Attention({})
    (mixer, *_), (next_mixer, *_) = mixers_of(model), mixers_of(following)
    assert isinstance(mixer, ImageWindowMixer)
    assert isinstance(next_mixer, ImageWindowMixer)
    source = replace(window_order(mixer, images), shift=0)
    target = PatchOrder(images, mixer.rows, mixer.columns, "merge", next_mixer.side)
    near, far = _rows_moved(source, target, rank % parallel.context, parallel.context, world.ranks_per_node)
    row = model.hidden_size * width
    return Attention({}, received_in_node=near * row, received_from_afar=far * row, messages=1)


@cache
def _rows_moved(source: PatchOrder, target: PatchOrder, rank: int, degree: int, ranks_per_node: int) -> tuple[int, int]:
    """Return the rows that a rank receives when tokens change their order, from its own node and from others."""
    own, node, tokens = target.indices()[rows_of_rank(target, rank, degree)], rank // ranks_per_node, source.indices()
    owners = np.empty(len(tokens), np.int32)
    for other in range(degree):
        owners[tokens[rows_of_rank(source, other, degree)]] = other
    from_others = owners[own][owners[own] != rank]
    near = int((from_others // ranks_per_node == node).sum())
    return near, len(from_others) - near


def _of_documents(model: ModelConfig, mixer: Mixer, lengths: Sequence[int], ranks: int) -> dict[AttentionWork, float]:
    """Count FLOPs for complete documents, divided evenly over the ranks."""
    found: dict[AttentionWork, float] = {}
    for length, count in Counter(lengths).items():
        part = AttentionWork("full", length)
        if mixer.causal:
            part = AttentionWork("causal", length)
        if 0 < mixer.window < length:
            part = AttentionWork("window", mixer.window)
        found[part] = found.get(part, 0.0) + count * mixer.flops(model, [length]) / ranks
    return found


def _of_schedule(mixer: Mixer, schedule: Schedule, rank: int, shape: AttentionShape) -> dict[AttentionWork, float]:
    pairs: Counter[AttentionWork] = Counter()
    for hop in schedule.hops(rank):
        for work in hop.work:
            table = work.slices.numpy()
            causal = _is_causal(table)
            queries, keys = table[:, Q_STOP] - table[:, Q_START], table[:, K_STOP] - table[:, K_START]
            # Equal slices have one rate, so sums by kind and size suffice.
            for is_causal, num_pairs, q, k in zip(causal, slice_areas(table), queries, keys, strict=True):
                part = AttentionWork("full", math.sqrt(int(q) * int(k)))
                if mixer.window:
                    part = AttentionWork("window", mixer.window)
                elif is_causal:
                    part = AttentionWork("causal", int(q))
                pairs[part] += int(num_pairs)
    every = sum(pairs.values())
    # Scale to the schedule's total for this rank's heads; a rank may have one head more than another.
    a_pair = schedule.flops(rank, shape) / max(1, every)
    return {part: count * a_pair for part, count in pairs.items()}


def _is_causal(table: np.ndarray) -> np.ndarray:
    """Mark slices cut by a diagonal, in which some query does not see the last key."""
    lo = table[:, LO]
    # A bound that excludes no pair does not count: the kernels ignore it too.
    return (lo != OPEN) & (lo > table[:, Q_START] - (table[:, K_STOP] - 1))


def _schedule(mixer: Mixer, parallel: ParallelSection, documents: PackedDocuments) -> Schedule:
    layout = SequenceLayout.build(
        parallel.layout,
        documents.num_tokens,
        parallel.context,
        documents,
        ulysses=parallel.ulysses,
        causal=mixer.causal,
    )
    return Schedule.build(layout, documents, mixer.causal, mixer.window or None, stride=mixer.stride)

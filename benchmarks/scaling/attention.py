"""A batch's layout, schedule and agreement, and the host's work for one layer's ring, on one rank of many.

The transports are a training run's own. Only the wire is a stand-in: it counts sent and received messages, and returns
empty buffers. Tensors have one head of one value, so only the host's work is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.scaling.figures import Figures, timed
from longctx.batch import PackedDocuments
from longctx.config import PRESETS, ModelConfig
from parallel.comm.communicator import PendingTensors
from parallel.comm.messages.kinds import Kind
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.schedule.attention_schedule import Schedule
from parallel.schedule.head_split import AttentionShape
from parallel.transport.kv_block import KeysAndValues, KVBlock, PartialResult
from parallel.transport.plan_comparison import fingerprint
from parallel.transport.ring_exchange import PendingGradients, empty_rows
from parallel.transport.transport_choice import build_transport, resolve_transport

PACKED_MEAN = 8192
"""Mean length of the packed documents, which are log-normal."""
NODE = 8
"""Ranks per node."""


@dataclass
class CountingExchange:
    """Stand-in for the ranks' exchange: nothing is sent, everything is counted."""

    peers: set[int] = field(default_factory=set)
    messages: int = 0
    rows: int = 0

    def keys(
        self, outgoing: KeysAndValues | None, *, to: int, like: KeysAndValues, rows: int, source: int, kind: Kind
    ) -> PendingTensors:
        """Count as ``RingExchange.keys`` would send."""
        self._count(outgoing, to, rows, source)
        return PendingTensors(_zeros(empty_rows(like, rows)) or ())

    def gradients(
        self, outgoing: KeysAndValues | None, *, to: int, like: KeysAndValues, rows: Any, source: int, kind: Kind
    ) -> PendingGradients:
        """Count as ``RingExchange.gradients`` would send."""
        self._count(outgoing, to, rows.num_rows, source)
        return PendingGradients(PendingTensors(_zeros(empty_rows(like, rows.num_rows)) or ()), rows)

    def _count(self, outgoing: KeysAndValues | None, to: int, rows: int, source: int) -> None:
        if outgoing is not None:
            self.peers.add(to)
            self.messages += 1
        if rows:
            self.peers.add(source)
            self.messages += 1
            self.rows += rows


def _zeros(buffers: KeysAndValues | None) -> KeysAndValues | None:
    if buffers is None:
        return None
    return buffers[0].zero_(), buffers[1].zero_()


def packed_documents(num_tokens: int, mean: int = PACKED_MEAN, seed: int = 0) -> PackedDocuments:
    """Return log-normal documents end to end, the last one cut."""
    draw = np.random.default_rng(seed)
    bounds = [0]
    while bounds[-1] < num_tokens:
        length = 1 + int(draw.lognormal(np.log(mean) - 0.5, 1.0))
        bounds.append(min(num_tokens, bounds[-1] + length))
    return PackedDocuments.of(bounds, num_tokens)


def mesh_of(rank: int, ranks: int, *, context: int, ulysses: int) -> Mesh:
    """Return the mesh of one rank of many, without its groups."""
    return Mesh(rank=rank, world_size=ranks, context=context, ulysses=ulysses, ranks_per_node=NODE)


def measure(figures: Figures, ranks: int, num_tokens: int, models: Sequence[str]) -> None:
    """Measure all costs of a sequence over ``ranks`` ranks, ring alone and Ulysses in a node × ring between nodes."""
    texts = {"one document": PackedDocuments.of(None, num_tokens), "packed": packed_documents(num_tokens)}
    for text, documents in texts.items():
        kind = {"one document": "zigzag", "packed": "balanced"}[text]
        for ulysses in (1, NODE):
            if ranks // ulysses >= 2:
                _measure_case(figures, ranks, text, kind, documents, ulysses, models)


def _measure_case(
    figures: Figures,
    ranks: int,
    text: str,
    kind: str,
    documents: PackedDocuments,
    ulysses: int,
    models: Sequence[str],
) -> None:
    layout, seconds = timed(lambda: SequenceLayout.build(kind, documents.num_tokens, ranks, documents, ulysses))
    transport = resolve_transport("auto", mesh_of(0, ranks, context=ranks, ulysses=ulysses))
    ring = f"ring {transport}"
    if ulysses > 1:
        ring = f"Ulysses {ulysses} × {ring}"
    case = f"{text}, {kind}, {ring}"
    every = {"needed": "ranks", "power": 1.0}
    why = "rounds of pairs are tried on all chunks at once, window by window"
    figures.add("layout of a batch", case, ranks, seconds, unit="s", why=why, **every)

    schedule = Schedule.build(layout, documents)
    mesh = mesh_of(ranks // 2, ranks, context=ranks, ulysses=ulysses)
    _, seconds = timed(lambda: fingerprint(schedule, "signature", None))
    figures.add("agreement on a plan", f"{case}: fingerprint", ranks, seconds, unit="s", **every)
    # 16 bytes per context rank: the minimum that identifies a mismatched rank.
    figures.add("agreement on a plan", f"{case}: gathered", ranks, 16 * ranks, unit="B", **every)

    partners = {"needed": "ranks", "power": 1.0}
    if text == "packed":
        partners = {"needed": "ranks that share a document", "power": 0.67}
    _, first_seconds = _one_layer(schedule, mesh, transport)
    again, seconds = _one_layer(schedule, mesh, transport)
    figures.add("schedule of a batch", case, ranks, first_seconds, unit="s", **partners)
    figures.add("a layer's ring, host only", case, ranks, seconds, unit="s", **partners)
    figures.add("peers a rank talks to", case, ranks, len(again.peers), **partners)
    for name in models:
        for kind_of_keys, shape in attention_shapes(PRESETS[name], ulysses).items():
            received = schedule.bytes_received(mesh.rank, shape, transport, mesh.ring_ranks_in_node)
            words: dict[str, Any] = {"unit": "B", "needed": "rows seen", "power": 0.0}
            figures.add(f"{kind_of_keys} a layer receives", f"{name}, {case}", ranks, received, **words)


def _one_layer(schedule: Schedule, mesh: Mesh, transport: str) -> tuple[CountingExchange, float]:
    """Run forward and backward of one layer's ring; return the counted messages and the host's CPU seconds."""
    exchange = CountingExchange()
    carried: Any = build_transport(transport, schedule, mesh)
    carried.exchange = exchange
    num_rows = schedule.layout.num_ring(mesh.ring_rank)
    own = (torch.zeros(1, num_rows, 1, 1), torch.zeros(1, num_rows, 1, 1))

    def forward_and_backward() -> None:
        carried.forward(*own, _attend)
        carried.backward(*own, _differentiate)

    _, seconds = timed(forward_and_backward)
    return exchange, seconds


def _attend(block: KVBlock) -> PartialResult:
    """Return a result with the right shape, without computing."""
    num_queries = block.queries.stop - block.queries.start
    out: Tensor = torch.zeros(1, num_queries, 1, 1)
    return out, torch.zeros(1, num_queries, 1)


def _differentiate(block: KVBlock) -> KeysAndValues:
    return torch.zeros_like(block.keys_BsKD), torch.zeros_like(block.values_BsKV)


def attention_shapes(config: ModelConfig, ulysses: int) -> dict[str, AttentionShape]:
    """Return a layer's heads as sent between ranks, in bfloat16."""
    if not config.is_latent:
        return {"keys and values": _shape(config, config.num_kv_heads)}
    # Each head expands its own key and value before they are sent. Ulysses could not split the single latent.
    if ulysses > 1:
        return {"keys and values": _shape(config, config.num_heads)}
    latents = AttentionShape(config.num_heads, 1, config.kv_lora_rank + config.rope_head_dim, 2, 0)
    return {"keys and values": _shape(config, config.num_heads), "latents, were they sent,": latents}


def _shape(config: ModelConfig, num_kv_heads: int) -> AttentionShape:
    return AttentionShape(config.num_heads, num_kv_heads, config.head_dim, 2, config.value_dim)

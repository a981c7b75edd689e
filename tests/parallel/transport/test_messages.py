"""Every message that a rank sends is one that another rank waits for: all ranks' exchanges, without a process.

A rank enters only the hops in which it has something to do, so what one leaves out nobody else may count on.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.comm.communicator import PendingTensors
from parallel.comm.messages.kinds import Kind
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.schedule.attention_schedule import Schedule
from parallel.schedule.row_ranges import RowRanges
from parallel.transport.kv_block import KVBlock
from parallel.transport.ring_exchange import PendingGradients, empty_rows
from parallel.transport.transport_choice import build_transport

RING, TOKENS = 12, 12 * 32
KEYS = (Kind.KEYS, Kind.KEYS_BETWEEN_NODES)
DOCUMENTS = {
    "one": [0, TOKENS],
    "short": [*range(0, TOKENS, 7), TOKENS],
    "mixed": [0, 1, 100, 103, 150, 290, 291, 300, TOKENS],
}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window": 9},
    "both ways": {"causal": False, "window": 20},
    "sinks": {"window": 5, "sink_tokens": 2},
    "stride": {"window": 4, "stride": 3},
}


@dataclass
class Recording:
    """What one rank sends and what it waits for, in its order: (peer, kind, rows)."""

    sent: list[tuple[int, Kind, int]] = field(default_factory=list)
    awaited: list[tuple[int, Kind, int]] = field(default_factory=list)

    def keys(self, outgoing, *, to: int, like, rows: int, source: int, kind: Kind) -> PendingTensors:
        self._note(outgoing, to, rows, source, kind)
        return PendingTensors(empty_rows(like, rows) or ())

    def gradients(self, outgoing, *, to: int, like, rows: RowRanges, source: int, kind: Kind) -> PendingGradients:
        self._note(outgoing, to, rows.num_rows, source, kind)
        return PendingGradients(PendingTensors(empty_rows(like, rows.num_rows) or ()), rows)

    def _note(self, outgoing, to: int, rows: int, source: int, kind: Kind) -> None:
        if outgoing is not None:
            self.sent.append((to, kind, outgoing[0].shape[1]))
        if rows:
            self.awaited.append((source, kind, rows))


def attend(block: KVBlock) -> tuple[Tensor, Tensor]:
    num_queries = block.queries.stop - block.queries.start
    return torch.zeros(1, num_queries, 1, 1), torch.zeros(1, num_queries, 1)


def differentiate(block: KVBlock) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(block.keys_BsKD), torch.zeros_like(block.values_BsKV)


def exchanges(schedule: Schedule, transport: str, ranks_per_node: int) -> list[Recording]:
    found = []
    for rank in range(RING):
        mesh = Mesh(rank=rank, world_size=RING, context=RING, ranks_per_node=ranks_per_node)
        carried: Any = build_transport(transport, schedule, mesh)
        carried.exchange = recording = Recording()
        own = (torch.zeros(1, TOKENS // RING, 1, 1), torch.zeros(1, TOKENS // RING, 1, 1))
        carried.forward(*own, attend)
        carried.backward(*own, differentiate)
        found.append(recording)
    return found


EVERY = list(itertools.product(DOCUMENTS, MASKS))
FEW = list(zip(itertools.cycle(DOCUMENTS), MASKS, strict=False))
"""All masks, and all documents at least once."""


@pytest.mark.few(3)
@pytest.mark.parametrize("cases", [FEW, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["few", "every"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "balanced"])
@pytest.mark.parametrize("way", [("p2p", RING), ("two_level", 2), ("two_level", 4)], ids=str)
def test_all_that_is_sent_is_awaited_in_that_order(layout: str, way: tuple[str, int], cases: list[tuple[str, str]]):
    for documents, mask in ((DOCUMENTS[name], MASKS[mask]) for name, mask in cases):
        schedule = Schedule.build(SequenceLayout.build(layout, TOKENS, RING, documents), documents, **mask)
        ranks = exchanges(schedule, *way)
        sent, awaited = defaultdict(list), defaultdict(list)
        for rank, recording in enumerate(ranks):
            for peer, kind, rows in recording.sent:
                sent[rank, peer, kind].append(rows)
            for peer, kind, rows in recording.awaited:
                awaited[peer, rank, kind].append(rows)
        assert sent == awaited
        assert all(source != to for source, to, _ in sent)
        # And all of it is what some query sees: nothing was left out.
        received = [sum(rows for _, kind, rows in recording.awaited if kind in KEYS) for recording in ranks]
        needed = [schedule.rows_received(rank) for rank in range(RING)]
        if way[0] == "p2p":
            # Forward and backward each bring them.
            assert received == [2 * rows for rows in needed]
        else:
            assert all(rows >= 2 * least for rows, least in zip(received, needed, strict=True))

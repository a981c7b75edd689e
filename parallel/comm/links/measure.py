"""Measure the links between ranks, a round of pairs at a time.

Ranks tell each other when a round is over, and what they found, through the store by which they met: a link that does
not work is one of the findings, so no link is needed to tell of it. Every wait ends.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed.distributed_c10d import _get_default_store

from longctx.errors import ClusterError
from parallel.comm.groups import warm, world_group
from parallel.comm.links.rates import LinkFailure, LinkLimits, LinkRate
from parallel.comm.links.rounds import MOST_ROUNDS, Pair, Round, pair_of, rounds_of_hosts
from parallel.comm.links.wire import GlooWire, NcclWire, TooSlowError, Wire

_FEW_MESSAGES, _MANY_MESSAGES = 10, 100
_SHORT_SECONDS = 2e-3
_SMALL_BYTES = 8
_MOST_LARGE = 8
_GROWTH = 4


def measure_links(
    *,
    device: torch.device,
    group: ProcessGroup | None = None,
    most_rounds: int = MOST_ROUNDS,
    limits: LinkLimits | None = None,
) -> list[LinkRate]:
    """The links of every pair of ranks on one host, and between the first ranks of all hosts. Collective.

    ``device`` says what is measured: gloo for the CPU, NCCL for a GPU. On every rank the same list, in which ranks are
    numbered as in ``group`` (by default all ranks). ClusterError on every rank where a link does not work.
    """
    members = dist.get_process_group_ranks(group)
    # Ranks of two groups may measure at the same time.
    store = PrefixStore(f"links of {'_'.join(map(str, members))}", _get_default_store())
    measuring = LinkMeasurement(store, members.index(dist.get_rank()), len(members), limits or LinkLimits())
    rounds = rounds_of_hosts(measuring.share(socket.gethostname()), most_rounds=most_rounds)
    if device.type == "cuda":
        warm(group or world_group())
        found = measuring.run(rounds, nccl=NcclRoom(group or world_group(), device, members))
    else:
        found = measuring.run(rounds)
    failures = [link for link in found if isinstance(link, LinkFailure)]
    if failures:
        lines = [f"  ranks {link.first} and {link.second}: {link.problem}" for link in failures]
        raise ClusterError("links between ranks do not work:\n" + "\n".join(lines) + "\n`longctx doctor` says more.")
    return [link for link in found if isinstance(link, LinkRate)]


class RanksMissingError(ClusterError):
    """Ranks that did not come to a meeting."""

    def __init__(self, ranks: Sequence[int], world_size: int) -> None:
        """``ranks`` are those that are missing."""
        self.ranks = list(ranks)
        super().__init__(f"ranks {self.ranks} of {world_size} ended or hang while links were measured.")


@dataclass(frozen=True)
class NcclRoom:
    """What NCCL measures in."""

    group: ProcessGroup
    device: torch.device
    world_ranks: Sequence[int]
    """Of each rank of the group, its rank in the world."""


class LinkMeasurement:
    """Ranks that measure their links together; they need a store that all reach, and no process group."""

    def __init__(self, store: Store, rank: int, world_size: int, limits: LinkLimits) -> None:
        """``store`` is shared by ``world_size`` ranks, each of which makes one of these. Collective."""
        self._rank, self._world_size, self._limits = rank, world_size, limits
        # All ranks call as often, so they agree on the number of this call.
        call = store.add(f"calls of {rank}", 1)
        self._store = PrefixStore(f"{call}", store)
        self._meetings = 0

    def share(self, value: str) -> list[str]:
        """Every rank's text. Collective; RanksMissingError names those that do not come."""
        self._meetings += 1
        store = PrefixStore(f"meeting {self._meetings}", self._store)
        store.set(f"{self._rank}", value)
        # The last one opens the door: a key for each rank would be asked for by every rank.
        if store.add("present", 1) == self._world_size:
            store.set("open", "")
        try:
            # Another rank's pair may take all the time there is, and more to find out.
            store.wait(["open"], timedelta(seconds=3 * self._limits.timeout_seconds))
            return [store.get(f"{rank}").decode() for rank in range(self._world_size)]
        except RuntimeError as error:
            missing = [rank for rank in range(self._world_size) if not store.check([f"{rank}"])]
            raise RanksMissingError(missing, self._world_size) from error

    def run(self, rounds: Sequence[Round], nccl: NcclRoom | None = None) -> list[LinkRate | LinkFailure]:
        """Every link of ``rounds``, the same list on every rank. By gloo, unless ``nccl`` is given. Collective."""
        found: dict[Pair, LinkRate | LinkFailure] = {}
        lost: set[int] = set()
        for pairs in rounds:
            mine = None
            pair = pair_of(self._rank, pairs)
            if pair is not None:
                mine = self._measure(pair, nccl, lost)
            for said in self.share(_to_text(mine)):
                _keep(found, _from_text(said))
            if nccl is not None:
                # What NCCL was asked for and did not do holds up all that follows on that GPU.
                tried = [pair for pair in pairs if not lost.intersection(pair)]
                lost.update(rank for pair in tried if isinstance(found[pair], LinkFailure) for rank in pair)
        return [found[pair] for pair in sorted(found)]

    def _measure(self, pair: Pair, nccl: NcclRoom | None, lost: Collection[int]) -> LinkRate | LinkFailure:
        stuck = [rank for rank in pair if rank in lost]
        if stuck:
            return LinkFailure(*pair, f"not measured: NCCL is stuck on rank {stuck[0]} after a link that failed")
        deadline = time.monotonic() + self._limits.timeout_seconds
        try:
            wire = self._wire(pair, nccl, deadline)
        except TooSlowError as error:
            return LinkFailure(*pair, f"{error}")
        return measure_pair(wire, pair, self._rank, self._limits, deadline)

    def _wire(self, pair: Pair, nccl: NcclRoom | None, deadline: float) -> Wire:
        if nccl is None:
            return GlooWire(self._store, pair, self._rank, deadline)
        other = pair[1 - pair.index(self._rank)]
        return NcclWire(nccl.group, nccl.world_ranks[other], nccl.device)


def measure_pair(wire: Wire, pair: Pair, rank: int, limits: LinkLimits, deadline: float) -> LinkRate | LinkFailure:
    """The link of ``rank`` to the other one of ``pair``, which calls this at the same time and finds the same."""
    passed, size = 0, _SMALL_BYTES
    # The fastest counts: what else runs on the machine makes an exchange slower, never faster.
    best, spent, num_large = 0.0, 0.0, 0
    try:
        latency = _latency(wire, deadline, answers=rank == pair[1])
        passed, size = size, limits.smallest_bytes
        while num_large < _MOST_LARGE and spent < limits.seconds:
            seconds = _exchange(wire, size, deadline)
            best, spent = max(best, size / seconds), spent + seconds
            if seconds < limits.target_seconds and size * _GROWTH <= limits.largest_bytes:
                passed, size = size, size * _GROWTH
            else:
                num_large += 1
    except TooSlowError as error:
        return LinkFailure(*pair, _what_failed(size, passed, limits.timeout_seconds, error))
    return LinkRate(*pair, bytes_per_second=best, latency_seconds=latency)


def _latency(wire: Wire, deadline: float, *, answers: bool) -> float:
    """Half of the shortest round trip of a small message; one rank asks, the other one answers."""
    shortest = _shortest_round_trip(wire, _FEW_MESSAGES, deadline, answers=answers)
    if shortest < _SHORT_SECONDS:
        # They cost nothing, and where machines are busy one in many meets nobody.
        shortest = min(shortest, _shortest_round_trip(wire, _MANY_MESSAGES, deadline, answers=answers))
    return shortest / 2


def _shortest_round_trip(wire: Wire, num_messages: int, deadline: float, *, answers: bool) -> float:
    """The same on both ranks, in seconds."""
    message = torch.ones(_SMALL_BYTES, dtype=torch.uint8, device=wire.device)
    shortest = torch.inf
    for _ in range(num_messages):
        started = time.perf_counter()
        if answers:
            wire.move(deadline, received=message)
            wire.move(deadline, sent=message)
        else:
            wire.move(deadline, sent=message)
            wire.move(deadline, received=message)
            shortest = min(shortest, time.perf_counter() - started)
    # The one that answers does not know when it was asked.
    if answers:
        shortest = 0.0
    return _larger(wire, shortest, deadline)


def _exchange(wire: Wire, size: int, deadline: float) -> float:
    """Seconds until both ranks have the ``size`` bytes that the other one sent."""
    sent = torch.ones(size, dtype=torch.uint8, device=wire.device)
    received = torch.ones_like(sent)
    # When this returns, both have their tensors ready, and begin.
    _larger(wire, 0.0, deadline)
    started = time.perf_counter()
    wire.move(deadline, sent=sent, received=received)
    return _larger(wire, time.perf_counter() - started, deadline)


def _larger(wire: Wire, value: float, deadline: float) -> float:
    """The larger one of both ranks' values, so that both go on alike."""
    mine = torch.tensor([value], dtype=torch.float64, device=wire.device)
    theirs = torch.zeros_like(mine)
    wire.move(deadline, sent=mine, received=theirs)
    return max(value, float(theirs.item()))


def _what_failed(size: int, passed: int, timeout_seconds: float, error: Exception) -> str:
    """Which message did not arrive, and which one did before it."""
    if not passed:
        return f"no message of {size} bytes passes within {timeout_seconds:g} s ({error})"
    return (
        f"messages of {passed} bytes pass, one of {size} bytes does not within {timeout_seconds:g} s for all ({error})"
    )


def _keep(found: dict[Pair, LinkRate | LinkFailure], link: LinkRate | LinkFailure | None) -> None:
    """Add what one rank of a pair found; a failure of either one counts."""
    if link is None:
        return
    pair = (link.first, link.second)
    if not isinstance(found.get(pair), LinkFailure):
        found[pair] = link


def _to_text(link: LinkRate | LinkFailure | None) -> str:
    if link is None:
        return "null"
    if isinstance(link, LinkFailure):
        return json.dumps([link.first, link.second, link.problem])
    return json.dumps([link.first, link.second, link.bytes_per_second, link.latency_seconds])


def _from_text(text: str) -> LinkRate | LinkFailure | None:
    values = json.loads(text)
    if values is None:
        return None
    if len(values) == 3:
        return LinkFailure(*values)
    return LinkRate(*values)

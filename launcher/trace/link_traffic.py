"""``Links``: a rank's bytes and messages, sent and received, by purpose and link."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from launcher.trace.rank_trace import LinkBytes

WITHIN, BETWEEN = "within a node", "between nodes"

_NAMES = {
    "send": "ring hop",
    "recv_": "ring hop",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "broadcast_": "broadcast",
    "barrier": "barrier",
}
"""Names in the report for torch.distributed operators."""


@dataclass
class Traffic:
    """A rank's bytes and messages over one kind of link."""

    sent_bytes: float = 0
    received_bytes: float = 0
    messages: int = 0
    """Messages it sends: one for each peer in a collective."""


class Links:
    """One step's traffic, by (purpose, link)."""

    def __init__(self, rank: int, ranks_per_node: int) -> None:
        self.rank, self.ranks_per_node = rank, ranks_per_node
        self.sums: dict[tuple[str, str], Traffic] = {}
        self._suffixes: dict[str, str] = {}

    def name(self, group: ProcessGroup | None, suffix: str) -> None:
        """Set the purpose shown for a group's collectives; a group keeps its first name."""
        if group is not None:
            self._suffixes.setdefault(group.group_name, suffix)

    def see(self, func: Any, args: Sequence[Any]) -> None:
        """Count a call if it belongs to torch.distributed."""
        name, group = _collective(func, args)
        if group is not None and name in _NAMES:
            self._count(name, group, args)

    def run_collective(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Execute a call on the CPU; for a collective, return a result as if every rank had sent this rank's values."""
        out = call()
        name, group = _collective(func, args)
        if group is None:
            return out
        # Fake peers send no data: checks for agreement would report that all ranks differ.
        if name == "allgather_":
            for outputs, own in zip(args[0], args[1], strict=True):
                for x in outputs:
                    x.copy_(own)
        elif name == "_allgather_base_":
            args[0].view(group.size(), -1).copy_(args[1].flatten())
        elif name == "allreduce_":
            # On the CPU a step uses all-reduce only to sum counts.
            for x in args[0]:
                x.mul_(group.size())
        return out

    def link_bytes(self) -> list[LinkBytes]:
        """Return traffic by purpose and link."""
        return [
            LinkBytes(
                what=purpose,
                link=link,
                sent_bytes=round(traffic.sent_bytes),
                received_bytes=round(traffic.received_bytes),
                messages=traffic.messages,
            )
            for (purpose, link), traffic in sorted(self.sums.items())
        ]

    def _count(self, name: str, group: ProcessGroup, args: Sequence[Any]) -> None:
        # Peers are numbered within their group; the node follows from the global rank.
        ranks = dist.get_process_group_ranks(group)
        purpose = _NAMES[name]
        if name not in ("send", "recv_") and group.group_name in self._suffixes:
            purpose = f"{purpose} {self._suffixes[group.group_name]}"
        tensors = [x for x in tree_leaves(list(args)) if isinstance(x, Tensor)]
        # CPU tensors use gloo: agreements and counts.
        if name == "barrier" or all(x.device.type == "cpu" for x in tensors):
            purpose = "control"
        if name == "send":
            self._add(purpose, ranks[args[2]], sent=_bytes(args[0]), messages=1)
        elif name == "recv_":
            self._add(purpose, ranks[args[2]], received=_bytes(args[0]))
        else:
            for peer, sent, received in _by_peer(name, ranks, self.rank, args):
                self._add(purpose, peer, sent=sent, received=received, messages=1)

    def _add(self, purpose: str, peer: int, *, sent: float = 0, received: float = 0, messages: int = 0) -> None:
        # Ranks are numbered node by node.
        link = BETWEEN
        if peer // self.ranks_per_node == self.rank // self.ranks_per_node:
            link = WITHIN
        traffic = self.sums.setdefault((purpose, link), Traffic())
        traffic.sent_bytes += sent
        traffic.received_bytes += received
        traffic.messages += messages


def _by_peer(name: str, ranks: Sequence[int], rank: int, args: Sequence[Any]) -> Iterator[tuple[int, float, float]]:
    """Yield (peer, bytes sent, bytes received) for a collective, modelled as a direct exchange between all ranks."""
    # Bytes equal those in ring algorithms; a message per peer is an upper bound.
    own, others = ranks.index(rank), [n for n, peer in enumerate(ranks) if peer != rank]
    for n in others:
        sent, received = _of_pair(name, args, n, own, len(ranks))
        yield ranks[n], sent, received


def _of_pair(name: str, args: Sequence[Any], peer: int, own: int, size: int) -> tuple[float, float]:
    if name == "alltoall_base_":
        out, given, out_sizes, in_sizes = args[0], args[1], args[3], args[4]
        return _part(given, in_sizes, peer, size), _part(out, out_sizes, peer, size)
    if name == "alltoall_":
        return _bytes(args[1][peer]), _bytes(args[0][peer])
    if name in ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"):
        return _bytes(args[1]), _bytes(args[1])
    if name in ("_reduce_scatter_base_", "reduce_scatter_"):
        return _bytes(args[0]), _bytes(args[0])
    if name in ("allreduce_", "allreduce_coalesced_"):
        # A ring all-reduce is a reduce-scatter and an all-gather.
        return 2 * _bytes(args[0]) / size, 2 * _bytes(args[0]) / size
    if name == "broadcast_":
        return _bytes(args[0]) / size, _bytes(args[0]) / size
    return 0, 0


def _part(tensor: Tensor, sizes: Sequence[int], peer: int, size: int) -> float:
    if not sizes:
        return _bytes(tensor) / size
    return sizes[peer] * _bytes(tensor[:1])


def _bytes(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(tensors) if isinstance(x, Tensor))


def _collective(func: Any, args: Sequence[Any]) -> tuple[str, ProcessGroup | None]:
    """Return a torch.distributed call's name and group; other calls have no group."""
    if func.namespace != "c10d":
        return "", None
    group = next((g for g in map(_as_group, args) if g is not None), None)
    return func.name().removeprefix("c10d::").split(".")[0], group


def _as_group(value: Any) -> ProcessGroup | None:
    if isinstance(value, torch.ScriptObject):
        try:
            return ProcessGroup.unbox(value)
        except RuntimeError:
            return None
    return None

"""Links between this machine's ranks: ring hops by size, all-to-alls, and the share hidden behind computation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from launcher.measure.profile_entry import ProfileEntry
from launcher.measure.rank_timer import RankTimer
from launcher.measure.sizes import BenchmarkSizes
from parallel.comm.communicator import Communicator, PendingTensors
from parallel.comm.process_groups import world_group
from parallel.comm.world import num_ranks, own_rank


def benchmark_links(timer: RankTimer, sizes: BenchmarkSizes) -> Iterator[ProfileEntry]:
    """Measure bytes per second that each rank sends while it receives as many, all ranks at once."""
    if num_ranks() == 1:
        yield from _of_one_rank(timer, sizes)
        return
    axes = {"bytes": sizes.message_bytes}
    hops = ProfileEntry("node_bandwidth", axes, "ring hops, all ranks at once")
    exchanges = ProfileEntry("exchange_bandwidth", axes, "all-to-all over all ranks")
    ranks, of_hops = num_ranks(), []
    for num_bytes in sizes.message_bytes:
        sent, received = (torch.zeros(num_bytes, dtype=torch.uint8, device=timer.device) for _ in range(2))
        of_hops.append(timer.collective_seconds(lambda: _hop(sent, received)))  # noqa: B023
        hops.add(None, num_bytes / of_hops[-1])
        # Each rank's own slice stays local.
        sent_bytes = num_bytes // ranks * (ranks - 1)
        sent, received = sent[: num_bytes // ranks * ranks], received[: num_bytes // ranks * ranks]
        exchanges.add(None, sent_bytes / timer.collective_seconds(lambda: _all_to_all(sent, received)))  # noqa: B023
    yield hops
    yield exchanges
    largest = sizes.message_bytes[-1] / of_hops[-1]
    yield ProfileEntry.of("network_bandwidth", largest, "the largest hop within this machine, in place of a network")
    # Latency: the smallest message's time beyond its bytes, at the largest message's rate.
    minimum = max(of_hops[0] - sizes.message_bytes[0] * of_hops[-1] / sizes.message_bytes[-1], 1e-7)
    yield ProfileEntry.of("message_seconds", minimum, "the smallest hop")
    yield ProfileEntry.of(
        "hidden_share", _hidden_share(timer, sizes.message_bytes[-1]), "a matmul with a concurrent hop, and without"
    )


def _of_one_rank(timer: RankTimer, sizes: BenchmarkSizes) -> Iterator[ProfileEntry]:
    """Yield the link entries that a profile must have, for a single rank without links."""
    description = "a single rank has no links: in-memory copies are measured instead"
    x = torch.zeros(sizes.message_bytes[-1], dtype=torch.uint8, device=timer.device)
    bandwidth = sizes.message_bytes[-1] / timer.seconds(x.clone)
    for name in ("node_bandwidth", "network_bandwidth"):
        yield ProfileEntry.of(name, bandwidth, description)
    small = x[: sizes.message_bytes[0]]
    yield ProfileEntry.of("message_seconds", timer.seconds(small.clone), description)


def _hop(sent: Tensor, received: Tensor) -> None:
    _start_hop(sent, received).wait()


def _start_hop(sent: Tensor, received: Tensor) -> PendingTensors:
    rank, ranks = own_rank(), num_ranks()
    to, source = {(rank + 1) % ranks: [sent]}, {(rank - 1) % ranks: [received]}
    return Communicator().send_recv(to, source, world_group(), operation="measuring hops")


def _all_to_all(sent: Tensor, received: Tensor) -> None:
    Communicator().all_to_all(sent, world_group(), operation="measuring exchanges", out=received)


def _hidden_share(timer: RankTimer, num_bytes: int) -> float:
    """Return the share of a hop's time, 0 to 1, that is hidden behind matmuls of equal duration."""
    sent, received = (torch.zeros(num_bytes, dtype=torch.uint8, device=timer.device) for _ in range(2))
    x_MM = torch.randn(256, 256, device=timer.device)
    hop_seconds, product = (
        timer.collective_seconds(lambda: _hop(sent, received)),
        timer.seconds(lambda: torch.mm(x_MM, x_MM)),
    )
    # The repeat count must match on all ranks, because they wait for one another.
    times = torch.tensor([max(1.0, hop_seconds / product)], dtype=torch.float64, device=timer.device)
    Communicator().all_reduce(times, world_group(), operation="agreeing on a matmul count", largest=True)
    repeats = min(int(times.item()), 10000)

    def multiply() -> None:
        for _ in range(repeats):
            torch.mm(x_MM, x_MM)

    def both() -> None:
        hop = _start_hop(sent, received)
        multiply()
        hop.wait()

    compute_seconds = timer.seconds(multiply)
    # Perfect overlap takes max(moving, computing), no overlap takes their sum.
    return min(1.0, max(0.0, (hop_seconds + compute_seconds - timer.collective_seconds(both)) / hop_seconds))

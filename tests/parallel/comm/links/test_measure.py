"""Links measured between real ranks, with rates that are known beforehand, and with links that do not work."""

from __future__ import annotations

import time
from itertools import combinations
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from longctx.errors import ClusterError
from parallel.comm.groups import world_group
from parallel.comm.links.measure import LinkMeasurement, NcclRoom, RanksMissingError, measure_links
from parallel.comm.links.outliers import find_outliers
from parallel.comm.links.rates import LinkFailure, LinkLimits, LinkRate
from parallel.comm.links.rounds import rounds_of
from parallel.comm.links.wire import GlooWire, TooSlowError, wait_until
from tests.helpers import run_distributed

CPU = torch.device("cpu")
QUICK = LinkLimits(largest_bytes=2**20, timeout_seconds=20)
SHORT = LinkLimits(largest_bytes=2**20, timeout_seconds=1.5)


def check_all_pairs(world: int):
    found = measure_links(device=CPU, limits=QUICK)
    assert [(rate.first, rate.second) for rate in found] == list(combinations(range(world), 2))
    assert all(rate.bytes_per_second > 0 and rate.latency_seconds > 0 for rate in found)
    everyone = [None] * world
    dist.all_gather_object(everyone, found)
    assert everyone == [found] * world, "the same list on every rank"
    # Once more in the same process: keys in the store do not clash.
    assert len(measure_links(device=CPU, limits=QUICK)) == len(found)


@pytest.mark.parametrize("world", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_every_pair_is_measured_and_told_to_all(world):
    run_distributed(check_all_pairs, world, world)


def check_group():
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    # Both at the same time.
    (rate,) = measure_links(device=CPU, group=groups[dist.get_rank() % 2], limits=QUICK)
    assert (rate.first, rate.second) == (0, 1), "numbered as in the group"


def test_the_ranks_of_a_group():
    run_distributed(check_group, 4)


def slowed(rank: int, bytes_per_second: float, seconds: float):
    """Within it, what this rank sends leaves so late, by its size."""
    move = GlooWire.move

    def slow(self, deadline, *, sent=None, received=None):
        if sent is not None and dist.get_rank() == rank:
            time.sleep(seconds + sent.nbytes / bytes_per_second)
        move(self, deadline, sent=sent, received=received)

    return patch.object(GlooWire, "move", slow)


def check_slow_rank():
    # 10 MB/s and 2 ms: a hundredth and the twentyfold of what any machine does within itself.
    with slowed(3, 1e7, 2e-3):
        found = measure_links(device=CPU, limits=QUICK)
    of_3 = [rate for rate in found if 3 in (rate.first, rate.second)]
    assert len(of_3) == 3
    for rate in of_3:
        # 1 MiB takes 105 ms and 2 ms more; a machine that is busy adds to it, as much as it will.
        assert 0 < rate.bytes_per_second <= 1e7
        # Of a round trip one message is late.
        assert rate.latency_seconds >= 1e-3
    assert {(x.quantity, x.ranks) for x in find_outliers(found)} >= {("bandwidth", (3,))}


def test_a_slow_rank_is_named_and_its_rate_is_what_it_was_slowed_to():
    run_distributed(check_slow_rank, 4)


def large_messages_lost(pair: tuple[int, int]):
    """Between these ranks small messages pass and others do not, as where hosts differ in MTU."""
    move, connect = GlooWire.move, GlooWire.__init__

    def remember(self, store, between, *rest):
        self.between = between
        connect(self, store, between, *rest)

    def lose(self, deadline, *, sent=None, received=None):
        if self.between == pair and sent is not None and sent.nbytes > 8:
            sent = None
        move(self, deadline, sent=sent, received=received)

    return patch.multiple(GlooWire, __init__=remember, move=lose)


def check_lost_messages():
    started = time.monotonic()
    measuring = LinkMeasurement(_get_default_store(), dist.get_rank(), 3, SHORT)
    with large_messages_lost((0, 2)):
        found = measuring.run(rounds_of(range(3)))
    assert [type(link) for link in found] == [LinkRate, LinkFailure, LinkRate]
    failure = found[1]
    assert isinstance(failure, LinkFailure)
    assert (failure.first, failure.second) == (0, 2)
    assert "messages of 8 bytes pass, one of 262144 bytes does not" in failure.problem
    assert time.monotonic() - started < 3 * 3 * SHORT.timeout_seconds
    with large_messages_lost((0, 1)), pytest.raises(ClusterError, match="ranks 0 and 1: messages of 8 bytes pass"):
        measure_links(device=CPU, limits=SHORT)


@pytest.mark.slow
def test_a_link_that_loses_messages_is_a_failure_and_the_others_are_measured():
    run_distributed(check_lost_messages, 3)


def check_no_connection():
    connect = GlooWire.__init__

    def never(self, store, pair, rank, deadline):
        if dist.get_rank() == 1:
            raise TooSlowError("it does not try")
        connect(self, store, pair, rank, deadline)

    measuring = LinkMeasurement(_get_default_store(), dist.get_rank(), 2, SHORT)
    with patch.object(GlooWire, "__init__", never):
        (failure,) = measuring.run(rounds_of(range(2)))
    assert isinstance(failure, LinkFailure)
    assert "gloo cannot connect" in failure.problem


def test_a_connection_that_never_comes_ends_in_time():
    run_distributed(check_no_connection, 2)


class StuckWire:
    """NCCL's way to a rank that never answers."""

    device = CPU

    def move(self, deadline, **tensors):
        wait_until(lambda: False, min(deadline, time.monotonic() + 0.2))


def check_stuck_rank():
    measuring = LinkMeasurement(_get_default_store(), dist.get_rank(), 4, SHORT)
    wire = LinkMeasurement._wire

    def stuck(self, pair, nccl, deadline):
        if pair == (1, 3):
            return StuckWire()
        return wire(self, pair, None, deadline)

    room = NcclRoom(world_group(), CPU, range(4))
    with patch.object(LinkMeasurement, "_wire", stuck):
        # 1 and 3 meet first. Their other pairs do not wait for what never comes; 0 and 2, which meet last, go on.
        found = measuring.run([((1, 3),), ((0, 1), (2, 3)), ((0, 3), (1, 2)), ((0, 2),)], nccl=room)
    problems = {(link.first, link.second): link.problem for link in found if isinstance(link, LinkFailure)}
    assert problems.pop((1, 3)) == "no message of 8 bytes passes within 1.5 s (no answer)"
    assert sorted(problems) == [(0, 1), (0, 3), (1, 2), (2, 3)]
    assert set(problems.values()) == {
        f"not measured: NCCL is stuck on rank {rank} after a link that failed" for rank in (1, 3)
    }
    assert [(link.first, link.second) for link in found if isinstance(link, LinkRate)] == [(0, 2)]


def test_a_gpu_on_which_nccl_is_stuck_is_not_asked_again():
    run_distributed(check_stuck_rank, 4)


def check_missing_rank():
    measuring = LinkMeasurement(_get_default_store(), dist.get_rank(), 3, LinkLimits(timeout_seconds=0.5))
    if dist.get_rank() != 1:
        with pytest.raises(RanksMissingError, match=r"ranks \[1\] of 3") as raised:
            measuring.share("here")
        assert raised.value.ranks == [1]


def test_ranks_that_do_not_come_are_named():
    run_distributed(check_missing_rank, 3)

"""A Communicator: what arrives, what it notes of it, and what it says when a rank is gone."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from longctx.errors import ClusterError
from parallel.comm.communicator import Communicator, PendingTensors
from parallel.comm.messages.kinds import Kind
from parallel.comm.messages.ledger import Ledger, is_balanced
from parallel.comm.process_groups import make_group, members, world_group
from parallel.comm.world import num_ranks, own_rank, sum_over_ranks
from parallel.runtime.activity import ACTIVITY
from parallel.runtime.watch.stack_traces import place_of_main
from parallel.zero.gradients import named_on_any_rank
from tests.helpers import on_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


def content(sender: int, receiver: int, rows: int, dtype: torch.dtype) -> Tensor:
    """What one rank sends another: known to both."""
    return (torch.arange(2 * rows) + 7 * sender + receiver).to(dtype).view(rows, 2)


def rows_between(sender: int, receiver: int) -> int:
    """Unequal, and none at all between some."""
    return (2 * sender + receiver) % 4


@on_ranks(3)
def test_what_ranks_send_arrives_and_is_noted_alike_on_both_sides() -> None:
    rank, ranks, group = own_rank(), range(num_ranks()), world_group()
    ledger = Ledger(rank)
    comm = Communicator(ledger)
    following, before = (rank + 1) % len(ranks), (rank - 1) % len(ranks)
    for dtype in DTYPES:
        mine = content(rank, 0, 3, dtype)
        expected = torch.stack([content(other, 0, 3, dtype) for other in ranks])
        assert torch.equal(comm.all_gather(mine.t(), group, operation="x", kind=Kind.STATES), expected.transpose(1, 2))
        out = torch.empty_like(expected)
        assert comm.all_gather(mine, group, operation="x", out=out) is out
        assert torch.equal(out, expected)
        several = comm.start_all_gather(mine[:0], mine, group=group, operation="x", kind=Kind.GATHERED_KEYS)
        (none,), (all_of_them,) = (pending.wait() for pending in several)
        assert none.shape == (len(ranks), 0, 2)
        assert torch.equal(all_of_them, expected)

        sent = torch.cat([content(rank, other, rows_between(rank, other), dtype) for other in ranks])
        received = [content(other, rank, rows_between(other, rank), dtype) for other in ranks]
        counts = [rows_between(rank, other) for other in ranks], [len(x) for x in received]
        for got in (
            comm.all_to_all(sent, group, operation="x", counts=counts, kind=Kind.HEADS),
            comm.start_all_to_all(sent, group, operation="x", counts=counts, kind=Kind.TOKENS).wait()[0],
        ):
            assert torch.equal(got, torch.cat(received))
        equal = torch.cat([content(rank, other, 2, dtype) for other in ranks])
        expected = torch.cat([content(other, rank, 2, dtype) for other in ranks])
        assert torch.equal(comm.all_to_all(equal, group, operation="x", kind=Kind.COUNTS), expected)
        out = torch.empty_like(equal)
        assert torch.equal(comm.all_to_all(equal, group, operation="x", out=out), out)
        assert torch.equal(out, expected)

        buffers = torch.empty(3, 2, dtype=dtype), torch.empty(0, 2, dtype=dtype)
        pending = comm.send_recv(
            {following: (mine, mine[:0])}, {before: buffers}, group, operation="x", kind=Kind.KEYS, hop=1
        )
        assert torch.equal(pending.wait()[0], content(before, 0, 3, dtype))
        assert not pending.sent
    # One direction alone, and neither.
    if rank == 0:
        comm.send_recv({1: [mine]}, {}, group, operation="x", kind=Kind.KEYS).wait()
    if rank == 1:
        pending = comm.send_recv({}, {0: [torch.empty_like(mine)]}, group, operation="x", kind=Kind.KEYS)
        assert torch.equal(pending.wait()[0], content(0, 0, 3, torch.uint8))
    assert comm.send_recv({}, {}, group, operation="x", kind=Kind.KEYS).wait() == ()
    assert PendingTensors().wait() == ()
    assert is_balanced(sum_over_ranks(ledger.balance(torch.device("cpu"))))
    assert ledger.sent

    assert comm.all_reduce(torch.tensor([rank]), group, operation="x").item() == sum(ranks)
    assert comm.all_reduce(torch.tensor([rank]), group, operation="x", largest=True).item() == ranks[-1]
    assert comm.broadcast(torch.tensor([rank]), 1, group, operation="x").item() == 1
    assert comm.broadcast_object({"of": rank}, 1, group, operation="x") == {"of": 1}
    assert comm.gather_objects(rank, group, operation="x") == list(ranks)
    gathered = comm.gather(torch.tensor([rank]), group, operation="x")
    assert (gathered is None) == (rank > 0)
    assert rank or gathered == [torch.tensor([other]) for other in ranks]


@on_ranks(4)
def test_messages_are_known_by_the_ranks_of_the_world() -> None:
    """Ranks 1 and 3 of four: another order of numbers in the group than in the world."""
    rank = own_rank()
    if rank % 2 == 0:
        return
    group = make_group([1, 3])
    assert (members(group).ranks, members(group).own, members(group).others) == ((1, 3), rank // 2, (4 - rank,))
    comm = Communicator(Ledger(rank))
    assert comm.all_gather(torch.tensor([rank]), group, operation="x", kind=Kind.STATES).flatten().tolist() == [1, 3]
    assert [x.message.sender for x in comm.ledger.received] == [4 - rank]
    gathered = comm.gather(torch.tensor([rank]), group, operation="x")
    assert (gathered is None) == (rank == 3)


CALLS: dict[str, Callable[[Communicator], object]] = {
    "all_gather": lambda comm: comm.all_gather(torch.ones(2), world_group(), operation="gathering things"),
    "all_to_all": lambda comm: comm.all_to_all(torch.ones(2), world_group(), operation="gathering things"),
    "start_all_to_all": lambda comm: comm.start_all_to_all(
        torch.ones(2), world_group(), operation="gathering things"
    ).wait(),
    "send_recv": lambda comm: comm.send_recv(
        {}, {1: [torch.ones(2)]}, world_group(), operation="gathering things"
    ).wait(),
    "all_reduce": lambda comm: comm.all_reduce(torch.ones(2), world_group(), operation="gathering things"),
    "gather_objects": lambda comm: comm.gather_objects(2, world_group(), operation="gathering things"),
}


SAID = r"^rank 0 gathering things( among ranks 0, 1)? \(forward\): .*\n.*died or did not respond"


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_a_rank_that_is_gone_is_named_by_what_was_under_way(name: str) -> None:
    dist.barrier()
    if own_rank() == 1:
        os._exit(0)
    distributed_c10d._set_pg_timeout(timedelta(seconds=10), world_group())
    ACTIVITY.phase = "forward"
    with pytest.raises(ClusterError, match=SAID):
        CALLS[name](Communicator())
    assert ACTIVITY.wait == ""
    os._exit(0)


@on_ranks(1)
def test_an_error_of_the_device_is_told_as_it_is() -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: an illegal access")):
        with patch.object(dist, "all_reduce", side_effect=error), pytest.raises(type(error)):
            Communicator().all_reduce(torch.ones(1), world_group(), operation="x")


@on_ranks(1)
def test_a_hang_is_placed_where_the_communicator_was_called() -> None:
    places: list[str] = []

    def look(*_: object) -> None:
        # The watch looks from a thread of its own.
        thread = Thread(target=lambda: places.append(place_of_main()))
        thread.start()
        thread.join()

    with patch.object(dist, "all_reduce", look), patch.object(dist, "get_world_size", lambda group=None: 2):
        sum_over_ranks(torch.ones(1))
        named_on_any_rank(torch.ones(1), ["one"])
    assert [place.split(":")[0] for place in places] == ["parallel/comm/world.py", "parallel/zero/gradients.py"]

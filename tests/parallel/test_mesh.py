"""Ranks on axes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from longctx.errors import ConfigError, DataError
from parallel.comm.world import broadcast_object, gather_objects, on_every_rank, raise_on_all_ranks
from parallel.mesh import Mesh, check_degrees
from tests.helpers import on_ranks


def test_a_lone_process_is_a_mesh_of_one():
    mesh = Mesh.build()
    assert (mesh.world_size, mesh.data, mesh.context, mesh.data_rank, mesh.context_rank) == (1, 1, 1, 0, 0)


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        ({"context": 3}, r"Try parallel\.context=2"),
        ({"context": 0}, "at least 1"),
        ({"context": 4, "ulysses": 3}, r"Try one of \[1, 2, 4\]"),
        ({"context": 2, "ulysses": 0}, "at least 1"),
        (
            {"context": 2, "expert": 3},
            r"parallel\.expert=3 does not divide the 4 ranks.*\n.*Try parallel\.expert=2 \(any of \[1, 2, 4\]",
        ),
        ({"context": 2, "expert": 8}, r"Try parallel\.expert=4"),
        ({"context": 1, "expert": 0}, "at least 1"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(degrees, said):
    with pytest.raises(ConfigError, match=said):
        check_degrees(4, **degrees)


@on_ranks(4)
def test_context_ranks_are_neighbours():
    mesh = Mesh.build(context=2)
    rank = dist.get_rank()
    assert (mesh.data, mesh.data_rank, mesh.context_rank) == (2, rank // 2, rank % 2)
    assert [mesh.ring_peer(i) for i in range(2)] == [2 * mesh.data_rank, 2 * mesh.data_rank + 1]
    total = torch.tensor([rank])
    dist.all_reduce(total, group=mesh.context_group)
    assert total.item() == 4 * mesh.data_rank + 1
    assert gather_objects(rank) == [0, 1, 2, 3]
    assert broadcast_object(rank) == 0


@on_ranks(8)
def test_those_that_split_heads_are_the_closest_neighbours():
    mesh = Mesh.build(context=4, ulysses=2, ranks_per_node=2)
    rank = dist.get_rank()
    assert (mesh.ring_degree, mesh.ring_rank, mesh.ulysses_rank) == (2, rank // 2 % 2, rank % 2)
    assert [mesh.ring_peer(i) for i in range(2)] == [4 * mesh.data_rank + rank % 2, 4 * mesh.data_rank + 2 + rank % 2]
    assert mesh.describe() == "8 ranks = data 2 × context 4 (ring 2 × ulysses 2)"
    for group, members in ((mesh.ring_group, [rank % 4 % 2, rank % 4 % 2 + 2]), (mesh.ulysses_group, [0, 1])):
        assert (
            dist.get_process_group_ranks(group)[1] - dist.get_process_group_ranks(group)[0] == members[1] - members[0]
        )
        assert rank in dist.get_process_group_ranks(group)


@on_ranks(8)
def test_neighbours_share_out_the_experts_whatever_they_read():
    rank = dist.get_rank()
    for context, expert in ((2, 4), (4, 2)):
        first = rank - rank % expert
        mesh = Mesh.build(context=context, expert=expert)
        assert mesh.expert_group is not None
        assert dist.get_process_group_ranks(mesh.expert_group) == list(range(first, first + expert))
        assert mesh.expert_rank == rank - first
    assert mesh.describe() == "8 ranks = data 2 × context 4, experts over 2"
    assert Mesh.build(context=4).expert_group is None
    odd = Mesh(rank=5, world_size=6, context=2, expert=3)
    assert (odd.expert_rank, odd.data_rank, odd.context_rank) == (2, 2, 1), "groups may cut across sequences"


def test_nodes_that_hold_equally_many_ranks_of_a_ring():
    def places(ranks_per_node, **axes):
        mesh = Mesh(rank=0, world_size=12, context=12, ranks_per_node=ranks_per_node, **axes)
        return mesh.ring_ranks_in_node

    assert [places(n) for n in (1, 2, 3, 4, 6, 12)] == [1, 2, 3, 4, 6, 12]
    assert places(5) == 1, "5, 5 and 2 ranks: nodes that are not alike hand nothing round"
    assert [places(n, ulysses=2) for n in (2, 4, 6)] == [1, 2, 3]


@on_ranks(3)
def test_one_rank_s_error_is_everybody_s():
    rank = dist.get_rank()
    raise_on_all_ranks(None)
    assert on_every_rank(lambda: rank) == rank

    def fail_on_one() -> None:
        if rank == 1:
            raise DataError("a shard is damaged")

    with pytest.raises(DataError, match="a shard is damaged") as caught:
        on_every_rank(fail_on_one)
    assert str(caught.value).startswith("rank 1: ") == (rank != 1)

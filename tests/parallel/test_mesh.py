"""Ranks on axes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from longctx.errors import ConfigError, DataError
from parallel.mesh import Mesh, check_degrees
from parallel.process import agree_or_raise, broadcast_object, gather_objects, on_every_rank
from tests.helpers import run_distributed


def test_a_lone_process_is_a_mesh_of_one():
    mesh = Mesh.build()
    assert (mesh.world_size, mesh.data, mesh.context, mesh.data_rank, mesh.context_rank) == (1, 1, 1, 0, 0)


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        ({"context": 3}, r"Try parallel\.context=2"),
        ({"context": 0}, "at least 1"),
        ({"context": 2, "ulysses": 2}, "not built yet"),
        ({"context": 2, "expert": 2}, "not built yet"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(degrees, said):
    with pytest.raises(ConfigError, match=said):
        check_degrees(4, **degrees)


def check_axes():
    mesh = Mesh.build(context=2)
    rank = dist.get_rank()
    assert (mesh.data, mesh.data_rank, mesh.context_rank) == (2, rank // 2, rank % 2)
    assert [mesh.context_peer(i) for i in range(2)] == [2 * mesh.data_rank, 2 * mesh.data_rank + 1]
    total = torch.tensor([rank])
    dist.all_reduce(total, group=mesh.context_group)
    assert total.item() == 4 * mesh.data_rank + 1
    assert gather_objects(rank) == [0, 1, 2, 3]
    assert broadcast_object(rank) == 0


def test_context_ranks_are_neighbours():
    run_distributed(check_axes, 4)


def check_agreement():
    rank = dist.get_rank()
    agree_or_raise(None)
    assert on_every_rank(lambda: rank) == rank

    def fail_on_one() -> None:
        if rank == 1:
            raise DataError("a shard is damaged")

    with pytest.raises(DataError, match="a shard is damaged") as caught:
        on_every_rank(fail_on_one)
    assert str(caught.value).startswith("rank 1: ") == (rank != 1)


def test_one_rank_s_error_is_everybody_s():
    run_distributed(check_agreement, 3)

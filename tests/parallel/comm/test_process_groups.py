"""Process groups: one time-out, warm from the start, each made by its own ranks; and the group that waits for disks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from launcher.training.totals import StepSums
from longctx.config import ModelConfig
from longctx.errors import DataError
from longctx.model.training_pass import Execution
from parallel.comm.messages.kinds import Kind
from parallel.comm.process import rendezvous_store, start_process_group
from parallel.comm.process_groups import CONTROL_TIMEOUT, clear_groups, control_group, device_backend, world_timeout
from parallel.comm.world import (
    broadcast_object,
    gather_objects,
    gather_on_rank_0,
    on_every_rank,
    on_rank_0,
    raise_on_all_ranks,
)
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from parallel.transport.ring_exchange import RingExchange
from parallel.zero.optimizer import OptimizerOptions
from parallel.zero.zero_engine import ZeroEngine
from tests.helpers import on_ranks

TIMEOUT = timedelta(seconds=37)
MOE = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, head_dim=16, num_experts=4, expert_ffn_size=16
)


def all_groups() -> list[ProcessGroup]:
    """The groups of this process: ours, torch's and DeepSpeed's."""
    return list(distributed_c10d._world.pg_map)


def timeout_of(group: ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def build_engine(mesh: Mesh, stage: int) -> None:
    model = build_parallel_model(MOE, mesh, layout="zigzag", execution=Execution())
    ZeroEngine(model, stage=stage, dtype=torch.float32, accumulation=1, options=OptimizerOptions())


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(4)
def test_every_group_has_the_run_s_time_out_and_is_warm(stage: int):
    distributed_c10d._set_pg_timeout(TIMEOUT, dist.group.WORLD)
    before = len(all_groups())
    mesh = Mesh.build(context=4, ulysses=2, expert=2, ranks_per_node=2)
    of_mesh = [mesh.context_group, mesh.ring_group, mesh.ulysses_group, mesh.expert_group]
    assert len(all_groups()) == before + len(of_mesh)
    build_engine(mesh, stage)
    assert len(all_groups()) > before + len(of_mesh), "DeepSpeed makes groups of its own"
    control = control_group()
    assert control is control_group()
    for group in all_groups():
        expected = TIMEOUT
        if group is control:
            expected = CONTROL_TIMEOUT
        assert timeout_of(group) == expected, dist.get_process_group_ranks(group)
        # A collective on each: NCCL leaves undefined what a batch of sends does as the first call of a group.
        if group is not dist.group.WORLD:
            assert group._get_sequence_number_for_group() > 0, dist.get_process_group_ranks(group)
    assert world_timeout() == TIMEOUT


@on_ranks(1)
def test_so_is_the_world_s_group():
    dist.destroy_process_group()
    clear_groups()
    del os.environ["RANK"]
    start_process_group(timeout_seconds=37)
    assert world_timeout() == TIMEOUT
    assert dist.group.WORLD is not None
    assert dist.group.WORLD._get_sequence_number_for_group() > 0


@on_ranks(8)
def test_a_rank_makes_its_own_groups_and_no_others():
    made = []
    new_group = dist.new_group

    def noting(ranks, **options):
        made.append(list(ranks))
        return new_group(ranks, **options)

    rank = dist.get_rank()
    with patch.object(dist, "new_group", noting):
        # Nodes of 3: the ring of ranks 0 to 3 has nodes that differ, that of 4 to 7 as well.
        Mesh.build(context=2, expert=4, ranks_per_node=3)
    assert made == [[rank // 2 * 2, rank // 2 * 2 + 1], list(range(rank // 4 * 4, rank // 4 * 4 + 4))]
    # The same once more, and on other axes: names never clash, whoever has made what before.
    for context in (2, 4, 8):
        mesh = Mesh.build(context=context, ulysses=2, ranks_per_node=3)
        total = torch.tensor([rank])
        dist.all_reduce(total, group=mesh.context_group)
        assert total.item() == sum(range(rank // context * context, (rank // context + 1) * context))


@on_ranks(4)
def test_rows_between_nodes_have_a_group_and_so_a_stream_of_their_own():
    mesh = Mesh.build(context=4, ranks_per_node=2)
    assert mesh.between_nodes_group is not None
    assert mesh.between_nodes_group is not mesh.ring_group
    assert mesh.ring_group is not None
    members = [dist.get_process_group_ranks(group) for group in (mesh.between_nodes_group, mesh.ring_group)]
    assert members == [[0, 1, 2, 3]] * 2
    exchange, rows = RingExchange(mesh, None), torch.zeros(1, 2, 1, 4)
    used = {}
    for kind in (Kind.KEYS, Kind.GRADIENTS, Kind.KEYS_BETWEEN_NODES, Kind.GRADIENTS_BETWEEN_NODES):
        with patch.object(dist, "batch_isend_irecv", lambda ops, kind=kind: used.update({kind: ops[0].group}) or []):
            exchange.keys((rows, rows), to=(mesh.rank + 1) % 4, like=(rows, rows), rows=0, source=mesh.rank, kind=kind)
    assert used[Kind.KEYS] is used[Kind.GRADIENTS] is mesh.ring_group
    assert used[Kind.KEYS_BETWEEN_NODES] is used[Kind.GRADIENTS_BETWEEN_NODES] is mesh.between_nodes_group
    assert Mesh.build(context=4, ranks_per_node=4).between_nodes_group is None
    assert Mesh.build(context=4, ranks_per_node=1).between_nodes_group is None


@pytest.mark.slow
@on_ranks(2)
def test_ranks_wait_for_one_that_hashes_or_saves_longer_than_the_time_out():
    rank = dist.get_rank()
    control_group()
    dist.barrier()
    # Shorter than what rank 0 is going to take: a collective of the world would give up.
    distributed_c10d._set_pg_timeout(timedelta(seconds=0.3), dist.group.WORLD)

    def slow_on_rank_0() -> int:
        if rank == 0:
            time.sleep(0.6)
        return rank

    waits: list[Callable[[], object]] = [
        lambda: on_every_rank(slow_on_rank_0),
        lambda: on_rank_0(slow_on_rank_0),
        lambda: broadcast_object(slow_on_rank_0()),
        lambda: gather_objects(slow_on_rank_0()),
        lambda: gather_on_rank_0(slow_on_rank_0()),
    ]
    for wait in waits:
        wait()
    slow_on_rank_0()
    problem = DataError("x") if rank == 1 else None
    with pytest.raises(DataError):
        raise_on_all_ranks(problem)
    distributed_c10d._set_pg_timeout(timedelta(seconds=60), dist.group.WORLD)


def test_groups_for_gpus_are_nccl_alone(monkeypatch):
    """What ranks compare on the CPU has groups of its own; gloo beside NCCL would connect all members again."""
    for backends, wanted in (("cpu:gloo,cuda:nccl", "nccl"), ("cpu:gloo,cuda:gloo", "gloo")):
        monkeypatch.setattr(dist, "get_backend_config", lambda backends=backends: backends)
        assert device_backend() == wanted


def test_the_sums_of_a_step_meet_on_the_device_that_computed_them():
    """Between backward and update nothing but the device's own group stands, and the host waits once."""
    seen = []
    sums = StepSums()
    empty = torch.empty(0, 0, dtype=torch.int64, device="meta")
    sums._sums = (torch.zeros(3, dtype=torch.float64, device="meta"), empty, torch.zeros(4, 0, device="meta"))

    class SeenError(Exception):
        pass

    def note(values: torch.Tensor) -> torch.Tensor:
        seen.append(values.device.type)
        raise SeenError

    with patch("launcher.training.totals.sum_over_ranks", note), pytest.raises(SeenError):
        sums.over_ranks(1.0, {})
    assert seen == ["meta"]


def test_whoever_listens_and_never_answers_is_no_rank_0(monkeypatch: pytest.MonkeyPatch):
    """torch's store would wait for ever: the system takes the connection for the program, which need not look."""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(stranger.getsockname()[1]))
        with pytest.raises(OSError, match=r"did not respond within 0 s, so it is not rank 0"):
            rendezvous_store(1, 2, timedelta(seconds=0.3))

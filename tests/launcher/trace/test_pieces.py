"""What a trace is made of, as far as it needs no CUDA build."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from launcher.config.load_config import load_run_config
from launcher.plan.planned_world import World, rank_kinds
from launcher.plan.synthetic_documents import synthetic_batch
from launcher.trace.assumed import EvenRouting
from launcher.trace.host_waits import HostWaits
from parallel.mesh import Mesh
from tests.helpers import REPOSITORY
from tests.longctx.samples import tiny_config


def config(**parallel: int):
    flags = ["--data.seq_len", "64", "--train.tokens_per_step", "64"]
    for name, value in {"context": 1, **parallel}.items():
        flags += [f"--parallel.{name}", str(value)]
    return load_run_config(flags)


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        ({}, {0: ()}),
        ({"context": 2}, {0: ("first ring rank",), 1: ("middle ring rank", "last ring rank")}),
        ({"context": 5}, {0: ("first ring rank",), 2: ("middle ring rank",), 4: ("last ring rank",)}),
        ({"context": 8, "ulysses": 8}, {0: (), 7: ("last rank in the Ulysses group",)}),
        ({"expert": 4}, {0: ("first rank in the expert group",), 3: ("last rank in the expert group",)}),
    ],
)
def test_one_rank_of_each_kind(parallel, ranks):
    assert {kind.rank: kind.names for kind in rank_kinds(config(**parallel))} == ranks


def test_a_rank_that_is_of_two_kinds_is_traced_once():
    kinds = rank_kinds(config(context=8, ulysses=2, expert=8))
    assert [kind.rank for kind in kinds] == [0, 1, 4, 6, 7]
    assert kinds[0].describe() == "rank 0 (first ring rank, first rank in the expert group)"


def test_the_world_is_the_smallest_that_the_degrees_make_unless_it_is_given():
    assert World.of(config(context=4, expert=6)) == World(ranks=12, ranks_per_node=8)
    assert World.of(config(context=2)) == World(ranks=2, ranks_per_node=2)
    assert World.of(config(context=2), 64, 4) == World(ranks=64, ranks_per_node=4)


@pytest.mark.parametrize(
    ("documents", "bounds"),
    [(0, (0, 64, 128)), (64, (0, 64, 128)), (24, (0, 24, 48, 64, 88, 112, 128)), (1000, (0, 64, 128))],
)
def test_the_batch_has_full_rows_of_documents_of_one_length(documents, bounds):
    flags = ["--data.seq_len", "64", "--train.tokens_per_step", "128", "--train.micro_batch_rows", "2"]
    batch = synthetic_batch(load_run_config(flags), documents)
    assert batch.documents.bounds == bounds
    assert batch.tokens.shape == batch.positions.shape == batch.document_ids.shape == (2, 64)
    positions, ids = batch.positions.flatten().tolist(), batch.document_ids.flatten().tolist()
    assert positions == [token - max(b for b in bounds if b <= token) for token in range(128)]
    assert ids == [sum(b <= token for b in bounds) - 1 for token in range(128)]


@pytest.mark.parametrize(("ranks", "experts", "chosen"), [(2, 2, 1), (4, 8, 2), (8, 64, 6), (4, 4, 4)])
def test_even_routing_sends_what_random_choices_send_on_average(ranks, experts, chosen):
    model = tiny_config(num_experts=experts, experts_per_token=chosen)
    mesh = Mesh(rank=0, world_size=ranks, context=1, expert=ranks)
    sizes = EvenRouting(mesh, model, HostWaits()).even_sizes(4096)
    assert sizes.num_assignments == 4096 * chosen
    torch.manual_seed(0)
    picks = torch.rand(4096, experts).topk(chosen).indices // (experts // ranks)
    sent = [int((picks == rank).any(1).sum()) for rank in range(ranks)]
    assert sizes.send_counts == sizes.recv_counts
    # Four standard deviations of a count of 4,096 draws.
    assert all(abs(mine - drawn) < 4 * 32 for mine, drawn in zip(sizes.send_counts, sent, strict=True))


@pytest.mark.slow
def test_a_trace_needs_no_deepspeed():
    """A Python with PyTorch's CUDA build is all that it asks for."""
    absent = (
        "import importlib.metadata as metadata, sys; sys.modules['deepspeed'] = None; found = metadata.version\n"
        "def version(name):\n"
        "    if name == 'deepspeed': raise metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "metadata.version = version\n"
        "import launcher.cli.plan_command, launcher.trace.trace, launcher.trace.trace_step"
    )
    done = subprocess.run([sys.executable, "-c", absent], cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr

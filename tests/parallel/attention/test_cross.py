"""Cross attention across ranks against its definition in float64: two sequences, each in a layout of its own."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longctx.batch import PackedDocuments
from longctx.errors import ConfigError
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.model.attention.core import AttentionShapes
from longctx.model.attention.local import LocalAttention
from longctx.model.attention.mask import AttentionMask
from parallel.attention.context_parallel_core import ContextParallelAttention
from parallel.attention.context_parallel_plan import ContextParallelOptions
from parallel.layout.sequence import KINDS, SequenceLayout
from parallel.mesh import Mesh
from parallel.schedule.attention_schedule import Schedule
from tests.helpers import on_ranks
from tests.parallel.attention.test_attention import ways

QUERIES, KEYS = 48, 96
PAIRS = {
    "one pair": ([0, 48], [0, 96]),
    "packed": ([0, 1, 5, 20, 40, 48], [0, 30, 31, 60, 95, 96]),
    "empty sides": ([0, 0, 7, 7, 30, 48, 48], [0, 9, 9, 40, 41, 95, 96]),
    "nothing to read": ([0, 20, 48], [0, 96, 96]),
    "short": ([*range(0, 49, 3)], [*range(0, 97, 6)]),
}
HEADS, KV_HEADS, D, V = 4, 2, 8, 6


@dataclass(frozen=True)
class Sides:
    """q, k, v and the output's gradient of whole sequences, and their documents."""

    tensors: tuple[Tensor, ...]
    documents: PackedDocuments
    key_documents: PackedDocuments


def sides(name: str, dtype: torch.dtype = torch.float64) -> Sides:
    g = torch.Generator().manual_seed(0)
    sizes = ((QUERIES, HEADS, D), (KEYS, KV_HEADS, D), (KEYS, KV_HEADS, V), (QUERIES, HEADS, V))
    tensors = tuple(torch.randn(1, *size, generator=g, dtype=torch.float64).to(dtype) for size in sizes)
    bounds, key_bounds = PAIRS[name]
    return Sides(tensors, PackedDocuments.of(bounds), PackedDocuments.of(key_bounds))


def by_definition(pair: Sides) -> list[Tensor]:
    """Output and gradients; zeros for queries whose document has no key."""
    q, k, v, dout = (x.double() for x in pair.tensors)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    own, theirs = (
        torch.arange(d.num_documents).repeat_interleave(torch.tensor(d.lengths))
        for d in (pair.documents, pair.key_documents)
    )
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(HEADS // KV_HEADS, 2)) * D**-0.5
    seen = own[:, None] == theirs
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).where(seen.any(1)[:, None], 0)
    out = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(HEADS // KV_HEADS, 2))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def shapes_of(q: Tensor, k: Tensor, v: Tensor) -> AttentionShapes:
    return AttentionShapes.of(q, k, v, ScoreRules(scale=D**-0.5))


def mask_of(pair: Sides) -> AttentionMask:
    return AttentionMask(pair.documents, causal=False, key_documents=pair.key_documents)


@pytest.mark.parametrize("kernel", ["reference", "blockwise", "cpu_flash"])
@pytest.mark.parametrize("name", PAIRS)
def test_one_process_equals_the_definition(name, kernel):
    pair = sides(name)
    q, k, v = (x.clone().requires_grad_() for x in pair.tensors[:3])
    core = LocalAttention(kernel)
    out = core(q, k, v, plan=core.plan(mask_of(pair), shapes_of(q, k, v)))
    found = [out.detach(), *torch.autograd.grad(out, (q, k, v), pair.tensors[3])]
    torch.testing.assert_close(found, by_definition(pair), rtol=1e-12, atol=1e-13)


def check(mesh: Mesh, way: dict, layout: str, key_layout: str, name: str) -> None:
    pair, ulysses = sides(name), way.get("ulysses", 1)
    own = SequenceLayout.build(layout, QUERIES, mesh.context, pair.documents, ulysses, causal=False)
    theirs = SequenceLayout.build(key_layout, KEYS, mesh.context, pair.key_documents, ulysses, causal=False)
    options = ContextParallelOptions(kernel="reference", transport=way["transport"])
    core = ContextParallelAttention(mesh, layout, options)
    layouts = (own, theirs, theirs, own)
    q, k, v, dout = (place.split(x, mesh.context_rank, 1) for place, x in zip(layouts, pair.tensors, strict=True))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    plan = core.plan(mask_of(pair), shapes_of(q, k, v), own, theirs)
    out = core(q, k, v, plan=plan)
    found = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
    wanted = [
        place.split(x, mesh.context_rank, 1)
        for place, x in zip((own, own, theirs, theirs), by_definition(pair), strict=True)
    ]
    said = f"{way}, {layout} × {key_layout}, {name}, rank {mesh.rank}"
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13, msg=lambda m: f"{said}: {m}")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("world_size", "every"),
    [(2, False), (3, False), (4, False), *(pytest.param(n, True, marks=pytest.mark.slow) for n in (1, 2, 3, 4))],
)
@on_ranks("world_size", timeout=120)
def test_every_layout_of_either_side_equals_one_process(every):
    for way in ways(dist.get_world_size() if dist.is_initialized() else 1):
        mesh = Mesh.build(
            context=dist.get_world_size() if dist.is_initialized() else 1,
            ulysses=way.get("ulysses", 1),
            ranks_per_node=way.get("ranks_per_node", 1),
        )
        choices = list(itertools.product(KINDS, KINDS, PAIRS))
        if not every:
            choices = random.Random(str(way)).sample(choices, 12)
        for layout, key_layout, name in choices:
            check(mesh, way, layout, key_layout, name)


def test_pairs_that_lie_on_one_rank_send_nothing():
    bounds, key_bounds = [0, 12, 24, 36, 48], [0, 24, 48, 72, 96]
    for kinds in itertools.product(("contiguous", "balanced"), repeat=2):
        own = SequenceLayout.build(kinds[0], 48, 4, bounds, causal=False)
        theirs = SequenceLayout.build(kinds[1], 96, 4, key_bounds, causal=False)
        schedule = Schedule.build(own, bounds, False, key_layout=theirs, key_documents=PackedDocuments.of(key_bounds))
        assert [schedule.rows_received(rank) for rank in range(4)] == [0, 0, 0, 0]
        assert [len(schedule.partners(rank).kv_ranks) for rank in range(4)] == [0, 0, 0, 0]
        assert schedule.imbalance() == 1.0


@pytest.mark.parametrize("kinds", itertools.product(KINDS, repeat=2), ids=str)
def test_every_pair_of_the_mask_is_computed_once(kinds):
    for bounds, key_bounds in PAIRS.values():
        own = SequenceLayout.build(kinds[0], QUERIES, 4, bounds, causal=False)
        theirs = SequenceLayout.build(kinds[1], KEYS, 4, key_bounds, causal=False)
        key_documents = PackedDocuments.of(key_bounds)
        schedule = Schedule.build(own, bounds, False, key_layout=theirs, key_documents=key_documents)
        pairs = sum(n * m for n, m in zip(PackedDocuments.of(bounds).lengths, key_documents.lengths, strict=True))
        assert sum(schedule.work(rank) for rank in range(4)) == pairs
        # Nothing finer than a document a rank: one slice for every two runs that meet.
        slices = [len(work.slices) for rank in range(4) for hop in schedule.hops(rank) for work in hop.work]
        assert sum(slices) <= 16 * (len(bounds) - 1)
        for rank in range(4):
            partners = schedule.partners(rank)
            if partners.are_known:
                assert {
                    owner for owner in range(4) if owner != rank and schedule.hop(rank, owner).num_rows
                } <= partners.kv_ranks


def test_sides_that_do_not_fit_are_refused():
    own, theirs = SequenceLayout.build("contiguous", 48, 2), SequenceLayout.build("contiguous", 96, 2)
    two = PackedDocuments.of([0, 50, 96])
    with pytest.raises(ConfigError, match="the queries have 1 documents, the keys 2"):
        Schedule.build(own, [0, 48], False, key_layout=theirs, key_documents=two)
    with pytest.raises(ConfigError, match="layout has 96 tokens, their documents 90"):
        Schedule.build(own, [0, 48], False, key_layout=theirs, key_documents=PackedDocuments.of([0, 90]))
    with pytest.raises(ConfigError, match="cross attention sees complete"):
        Schedule.build(own, [0, 48], True, key_layout=theirs, key_documents=PackedDocuments.of([0, 96]))
    other = SequenceLayout.build("contiguous", 96, 4)
    with pytest.raises(ConfigError, match="context 4 and ulysses 1"):
        Schedule.build(own, [0, 48], False, key_layout=other, key_documents=PackedDocuments.of([0, 96]))
    with pytest.raises(ConfigError, match="1 query documents and 2 key documents"):
        AttentionMask((0, 48), causal=False, key_documents=two)
    with pytest.raises(ConfigError, match="cross attention sees complete"):
        AttentionMask((0, 48), key_documents=PackedDocuments.of([0, 96]))

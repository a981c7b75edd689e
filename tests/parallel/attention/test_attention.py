"""Attention across ranks against its definition in float64: values and gradients, for all that users can choose."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from longctx.errors import ClusterError, ConfigError
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.kernels.processor import MatmulMode
from longctx.model.attention.core import AttentionShapes
from parallel.attention.context_parallel_plan import ContextParallelOptions, ContextParallelPlan
from parallel.attention.context_parallel_softmax import context_parallel_attention, planned_attention
from parallel.layout.sequence import KINDS, SequenceLayout
from parallel.mesh import Mesh
from parallel.schedule.attention_schedule import Schedule
from parallel.transport.transport_choice import TRANSPORTS
from tests.helpers import on_ranks, run_distributed
from tests.parallel.attention.attention_cases import DOCUMENTS, MASKS, Case, check_case, errors_of, spread
from tests.rounding import ATTENTION, both_ways, rounded

EXACT = 1e-13
"""float64 throughout: nothing but the order of additions."""


def ways(world_size: int) -> list[dict]:
    """How ``world_size`` ranks can share a sequence: transports, nodes, heads."""
    found = [{"transport": "p2p"}, {"transport": "all_gather"}]
    found += [{"transport": "two_level", "ranks_per_node": n} for n in range(2, world_size) if world_size % n == 0]
    for u in range(2, min(world_size, 4) + 1):
        if world_size % u == 0:
            found += [{"ulysses": u, "transport": t} for t in (("p2p", "all_gather") if u < world_size else ("p2p",))]
    return found


def shares(way: dict, *choices, all_p2p: bool) -> list[tuple]:
    """A dozen combinations (the same on every rank); or every one, where rows go straight to who needs them."""
    every = list(itertools.product(*choices))
    return every if all_p2p and way == {"transport": "p2p"} else random.Random(str(way)).sample(every, 12)


def build_mesh(case: Case) -> Mesh:
    world = dist.get_world_size() if dist.is_initialized() else 1
    return Mesh.build(context=world, ulysses=case.ulysses, ranks_per_node=case.ranks_per_node)


@pytest.mark.parametrize(
    ("world_size", "all_p2p"),
    [
        (3, False),
        *(pytest.param(n, False, marks=pytest.mark.slow) for n in (1, 4)),
        *(pytest.param(n, True, marks=pytest.mark.slow) for n in (1, 2, 3, 4)),
    ],
)
@on_ranks("world_size")
def test_every_way_layout_packing_and_mask_equals_one_process(all_p2p):
    for way in ways(dist.get_world_size()):
        mesh = build_mesh(Case(**way))
        for layout, documents, mask in shares(way, KINDS, DOCUMENTS, MASKS, all_p2p=all_p2p):
            check_case(Case(layout=layout, documents=documents, mask=mask, **way), mesh, EXACT)


TWO_LEVELS = {"transport": "two_level"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "way"),
    [(6, {"ranks_per_node": 3}), (6, {"ranks_per_node": 2}), (8, {"ranks_per_node": 4, "ulysses": 2})],
)
@on_ranks("world_size")
def test_nodes_of_six_ranks_and_of_eight_that_split_heads(way):
    mesh = build_mesh(Case(**TWO_LEVELS, **way))
    for layout in KINDS:
        check_case(Case(layout=layout, **TWO_LEVELS, **way), mesh, EXACT)


ODD_TOKENS = 70
"""Twice five times seven: halves of equal parts of five and of seven ranks."""


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("world_size", [5, 7])
@on_ranks("world_size", timeout=150)
def test_five_and_seven_ranks():
    """Numbers of ranks that no power of two divides: rows lie side by side on any (``parallel.tokens_per_rank``)."""
    for way in ({"transport": "p2p"}, {"transport": "all_gather"}):
        mesh = build_mesh(Case(**way))
        every = list(itertools.product(KINDS, DOCUMENTS, MASKS))
        for layout, documents, mask in random.Random(str(way)).sample(every, 18):
            case = Case(layout=layout, documents=documents, mask=mask, tokens=ODD_TOKENS, **way)
            check_case(case, mesh, EXACT)


RULES = {
    "softcap": {"scores": {"softcap": 2.0}},
    "alibi": {"scores": {"alibi": True}},
    "relative": {"scores": {"relative": True}},
    "sinks": {"sinks": True},
    "all": {"scores": {"softcap": 3.0, "alibi": True, "relative": True}, "sinks": True},
    "values narrower": {"value_dim": 4},
    "values wider": {"value_dim": 12},
}
RULES_ON = (("blockwise", 2), ("reference", 3), ("blockwise", 4))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kernel", "world_size", "all_p2p"),
    [
        ("blockwise", 2, False),
        ("reference", 3, False),
        *(pytest.param(kernel, n, True, marks=pytest.mark.slow) for kernel, n in RULES_ON),
    ],
)
@on_ranks("world_size")
def test_score_rules_and_sinks_equal_one_process(kernel, all_p2p):
    for way in ways(dist.get_world_size()):
        mesh = build_mesh(Case(**way))
        for layout, rule, mask in shares(way, KINDS, RULES, ("causal", "near"), all_p2p=all_p2p):
            check_case(Case(layout=layout, mask=mask, kernel=kernel, **way, **RULES[rule]), mesh, EXACT)


each_layout = pytest.mark.parametrize("layouts", [1, pytest.param(len(KINDS), marks=pytest.mark.slow)])
"""How many layouts each way is tried in. With one, every layout has its turn in some way."""


def ways_in(layouts: int) -> list[tuple[dict, tuple[str, ...]]]:
    """Ways of four ranks, and the layouts to try each in."""
    return [(way, tuple((KINDS * 2)[n % len(KINDS) :][:layouts])) for n, way in enumerate(ways(4))]


@each_layout
@on_ranks(4)
def test_float32_is_no_worse_on_many_ranks(layouts):
    """One process's fp32 SDPA is 4e-7 off."""
    for way, kinds in ways_in(layouts):
        mesh = build_mesh(Case(**way))
        for layout, mask in itertools.product(kinds, ("causal", "sinks")):
            case = Case(layout=layout, mask=mask, tokens=192, kernel="cpu_flash", dtype=torch.float32, **way)
            check_case(case, mesh, 5e-7)


NO_WORSE: dict[MatmulMode, float] = {"float32": 1.01, "native": 2**0.5}
"""How much further off results may be on many ranks than in one process, in bfloat16.

In float32 ranks hand float32 on and round at the end, once, as one process does: 1, but for the sums that come out on
the other side of a boundary. Natively the kernel rounds what it makes of each rank's keys, one process what it makes
of all. The errors of the parts add up like the parts, to as much. But one process's result has its final form then, and
the sum of many is rounded once more: √2 where the first was all, less where scores and weights are rounded besides.
"""


@pytest.mark.few(1)
@each_layout
@both_ways
@on_ranks(4)
def test_bfloat16_is_no_worse_on_many_ranks(products, layouts):
    for mask in ("causal", "sinks"):
        one = Case(mask=mask, tokens=192, kernel="cpu_flash", dtype=torch.bfloat16, matmul_mode=products)
        alone = errors_of(one, Mesh.build())
        assert max(alone.values()) <= ATTENTION[products], alone
        for way, kinds in ways_in(layouts):
            mesh = build_mesh(Case(**way))
            for layout in kinds:
                many = errors_of(replace(one, layout=layout, **way), mesh)
                worse = {name: many[name] / alone[name] for name in alone}
                assert max(worse.values()) <= NO_WORSE[products], f"{worse} times one process's in {layout}, {way}"


HEADS = [(5, 5), (6, 3), (7, 1), (12, 4), (6, 2)]
"""Query and key heads: a prime, groups that a split cuts through, one key head for all, more ranks than key heads."""


@on_ranks(4)
def test_heads_that_do_not_divide():
    for ulysses in (2, 4):
        mesh = build_mesh(Case(ulysses=ulysses))
        for heads, kv_heads in HEADS:
            case = Case(heads=heads, kv_heads=kv_heads, ulysses=ulysses, sinks=True, scores={"relative": True})
            check_case(case, mesh, EXACT)


@on_ranks(3)
def test_gradients_may_travel_in_bfloat16():
    """What other ranks made of a rank's gradients is rounded once each; its own share may be √3 times the mean."""
    mesh = build_mesh(Case())
    for transport in ("p2p", "all_gather"):
        case = Case(transport=transport, dtype=torch.float32, kernel="cpu_flash")
        check_case(replace(case, communication_dtype=torch.bfloat16), mesh, rounded(1) * 3**0.5)
        with pytest.raises(AssertionError, match="dk"):
            check_case(replace(case, communication_dtype=torch.bfloat16), mesh, 1e-6)


@on_ranks(4)
def test_repetition_gives_equal_bits():
    for way in ways(4):
        mesh = build_mesh(Case(**way))
        case = Case(dtype=torch.float32, kernel="cpu_flash", sinks=True, **way)
        (_, first), (_, second) = spread(case, mesh), spread(case, mesh)
        assert all(torch.equal(first[name], second[name]) for name in first)


@on_ranks(4)
def test_stacked_sequences_share_a_schedule():
    for way in ways(4):
        check_case(Case(batch=2, **way), build_mesh(Case(**way)), EXACT)


def test_rows_of_a_batch_equal_their_flattened_sequence():
    case = Case(tokens=24, dtype=torch.float32)
    q, k, v, _ = case.inputs()
    schedule = Schedule.build(SequenceLayout.build("contiguous", 24, 1), [0, 5, 12, 24])
    flat = context_parallel_attention(q, k, v, schedule=schedule, mesh=Mesh.build())
    rows = [x.view(2, 12, *x.shape[2:]) for x in (q, k, v)]
    assert torch.equal(context_parallel_attention(*rows, schedule=schedule, mesh=Mesh.build()).view(flat.shape), flat)


@on_ranks(3)
def test_keys_in_a_layout_of_their_own():
    case, mesh = Case(), build_mesh(Case())
    queries, keys = (SequenceLayout.build(kind, 48, 3, case.cu_seqlens) for kind in ("zigzag", "striped"))
    schedule = Schedule.build(queries, case.cu_seqlens, key_layout=keys)
    q, k, v, _ = case.inputs()
    mine = (queries.split(q, mesh.rank, 1), keys.split(k, mesh.rank, 1), keys.split(v, mesh.rank, 1))
    straight = Schedule.build(queries, case.cu_seqlens)
    want = context_parallel_attention(
        *(queries.split(x, mesh.rank, 1) for x in (q, k, v)), schedule=straight, mesh=mesh
    )
    torch.testing.assert_close(context_parallel_attention(*mine, schedule=schedule, mesh=mesh), want)


@on_ranks(2)
def test_what_a_rank_cannot_take_is_said_on_every_rank():
    mesh = build_mesh(Case())
    layout = SequenceLayout.build("contiguous", 16, 2)
    q, k, v, _ = (layout.split(x, mesh.rank, 1) for x in Case(tokens=16).inputs())

    def refused(said, error=ConfigError, *, at=(q, k, v), **options):
        with pytest.raises(error, match=said):
            context_parallel_attention(*at, **{"schedule": Schedule.build(layout), "mesh": mesh} | options)

    short = (q[:, :6], k, v) if mesh.rank else (q, k, v)  # one rank alone is wrong
    refused("context rank 1: rank 1 received 6 queries", at=short)
    refused("values.*one dtype", at=(q, k, v.float()))
    refused("one logit for each of 4 query heads", sinks_H=torch.zeros(3))
    refused("different attention calls", ClusterError, schedule=Schedule.build(layout, [0, 3 + mesh.rank, 16]))
    refused("different attention calls", ClusterError, schedule=Schedule.build(layout, causal=mesh.rank == 0))
    refused("gradients as torch.bfloat16", ClusterError, communication_dtype=torch.bfloat16 if mesh.rank else None)
    refused("transport='smoke' is unknown", transport="smoke")
    refused("is unknown. Try one of", kernel="fast")
    refused("are both given", scale=1.0, scores=Case().build_scores(None))
    refused("the mesh has context 2", schedule=Schedule.build(SequenceLayout.build("contiguous", 16, 4)))
    refused("two_level needs a ring", transport="two_level", mesh=replace(mesh, ranks_per_node=3, rank=mesh.rank + 2))
    case = Case(heads=1, kv_heads=1, ulysses=2)
    with pytest.raises(ConfigError, match="ulysses=2 exceeds the 1 query heads"):
        spread(case, build_mesh(case))


@pytest.mark.parametrize("transport", [t for t in TRANSPORTS if t != "auto"])
def test_a_peer_that_dies_in_a_hop_is_an_error_and_no_hang(transport):
    with pytest.raises(AssertionError, match="told of the dead rank"):
        run_distributed(check_dead_peer, 4, transport, timeout=20.0)


def check_dead_peer(transport):
    case = Case(transport=transport, ranks_per_node=2)
    mesh = build_mesh(case)
    spread(case, mesh)  # all are there, and agree
    layout = SequenceLayout.build("zigzag", 48, 4)
    q, k, v, _ = (layout.split(x, mesh.rank, 1) for x in case.inputs())
    shapes = AttentionShapes.of(q, k, v, ScoreRules(scale=case.head_dim**-0.5))
    plan = ContextParallelPlan.build(Schedule.build(layout), mesh, shapes, ContextParallelOptions(transport=transport))
    planned_attention(q, k, v, plan)
    if mesh.rank == 2:
        raise SystemExit("gone")
    with pytest.raises(ClusterError, match=r"rank \d (exchanging|gathering)[\s\S]*died or did not respond"):
        planned_attention(q, k, v, plan)
    raise RuntimeError("told of the dead rank")

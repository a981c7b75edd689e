"""Sparse and linear layers over ranks: what is scheduled, values and every gradient, and what is sent."""

from __future__ import annotations

import itertools
import random
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.config.check import check_run
from launcher.config.load import from_values
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.kernels.attention.slices import table_slices
from longctx.model.attention.cache import KVCache
from longctx.model.attention.local import LocalAttention
from longctx.model.attention.mask import AttentionMask
from longctx.model.decoder import Decoder
from longctx.model.kept import Keep
from longctx.model.training_pass import Execution
from parallel.layout.sequence import KINDS, SequenceLayout
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from parallel.schedule.heads import AttentionShape
from parallel.schedule.schedule import Schedule
from tests.helpers import on_ranks, run_distributed
from tests.longctx.attention_cores import attend_once
from tests.oracles import packed_batch
from tests.parallel.attention.attention_cases import DOCUMENTS, MASKS, Case, check_case
from tests.parallel.attention.test_attention import EXACT, ways
from tests.parallel.attention.test_recompute import SENDING
from tests.parallel.schedule.test_schedule import full_mask

# --- what a stride's schedule names ---------------------------------------------------------------------------------


def scheduled(schedule: Schedule, rank: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """(how often each query of a ring rank meets each key, these queries' tokens, the tokens that travelled to it)."""
    layout, ring_rank = schedule.layout, rank // schedule.layout.ulysses
    tokens = [torch.cat([torch.arange(r.start, r.stop, r.step) for r in runs]) for runs in layout.runs]
    seen = torch.zeros(len(tokens[ring_rank]), layout.num_tokens, dtype=torch.int64)
    travelled: list[int] = []
    for hop in schedule.hops(rank):
        keys = torch.cat([tokens[hop.owner][a:b] for a, b in hop.rows]) if hop.rows else torch.empty(0).long()
        travelled += keys.tolist() if hop.owner != ring_rank else []
        queries = torch.arange(*hop.queries)
        for number, (query_rows, key_rows, slices) in enumerate(hop.work):
            if number:
                assert all(len(rows.unique()) == len(rows) for rows in (query_rows, key_rows))
            for p in table_slices(slices):
                i, j = torch.arange(p.q_start, p.q_stop)[:, None], torch.arange(p.k_start, p.k_stop)
                inside = (i - j >= (-(2**40) if p.lo is None else p.lo)) & (i - j <= (2**40 if p.hi is None else p.hi))
                local, token = queries[query_rows][i], keys[key_rows][j]
                seen[local, token] += inside
                if schedule.distances or number:
                    apart = tokens[ring_rank][local] - token
                    assert torch.equal((p.step * (i - j) + p.offset)[inside], apart[inside])
    return seen, tokens[ring_rank], travelled


@st.composite
def sparse_cases(draw):
    kind, ring, ulysses = draw(st.sampled_from(KINDS)), draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 2]))
    tokens = 2 * ring * ulysses * draw(st.integers(1, 6))
    cu_seqlens = sorted([0, *draw(st.lists(st.integers(0, tokens), max_size=6)), tokens])
    layout = SequenceLayout.build(kind, tokens, ring * ulysses, cu_seqlens, ulysses)
    window, stride = (draw(st.integers(1, 9) | st.integers(1, tokens + 2)) for _ in range(2))
    return layout, {"cu_seqlens": cu_seqlens, "window": window, "stride": stride}


@settings(max_examples=60, deadline=None)
@given(sparse_cases(), st.booleans(), st.integers(1, 3))
def test_every_pair_is_computed_once_and_nothing_else_travels(case, distances, places):
    layout, mask_words = case
    schedule, mask = Schedule.build(layout, **mask_words), full_mask(**mask_words)
    schedule = schedule.with_distances() if distances else schedule
    shape = AttentionShape(1, 1, 1, 1)
    for rank in range(0, layout.degree, layout.ulysses):
        seen, tokens, travelled = scheduled(schedule, rank)
        assert torch.equal(seen, mask[tokens].long())
        assert schedule.work(rank) == int(mask[tokens].sum())
        needed = set(mask[tokens].any(0).nonzero().flatten().tolist()) - set(tokens.tolist())
        assert sorted(travelled) == sorted(needed)
        assert schedule.rows_received(rank) == len(needed)
        if layout.ulysses == 1:
            assert schedule.bytes_received(rank, shape) == 2 * len(needed)
            if layout.ring_degree % places == 0:
                assert schedule.bytes_received(rank, shape, "two_level", places) >= 2 * len(needed)


def test_a_stride_that_the_ring_divides_sends_nothing_in_striped_layouts():
    layout = SequenceLayout.build("striped", 240, 4)
    for stride, least, most in ((12, 0, 0), (10, 50, 60), (7, 150, 180)):  # classes on one rank, on two, on all four
        for rank in range(4):
            assert least <= Schedule.build(layout, window=1, stride=stride).rows_received(rank) <= most


def test_masks_that_make_no_sense_are_refused():
    layout = SequenceLayout.build("contiguous", 8, 2)
    for stride, window, sink_tokens in [(-1, None, 0), (2, None, 0), (2, 2, 1)]:
        with pytest.raises(ConfigError, match="needs a window and causal attention"):
            Schedule.build(layout, window=window, sink_tokens=sink_tokens, stride=stride)
    keys = SequenceLayout.build("striped", 8, 2)
    with pytest.raises(ConfigError, match="in one layout"):
        Schedule.build(layout, window=2, stride=3, key_layout=keys)
    assert Schedule.build(layout, window=2, stride=3).digest != Schedule.build(layout, window=2).digest


# --- attention ------------------------------------------------------------------------------------------------------

STRIDES = {"1/1": (1, 1), "2/5": (2, 5), "5/1": (5, 1), "3/7": (3, 7), "7/4": (7, 4), "4/8": (4, 8), "11/60": (11, 60)}
"""(window, stride): one, primes, multiples of the degree, larger than the documents."""


@pytest.mark.parametrize("world_size", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_sparse_attention_equals_one_process(world_size):
    run_distributed(check_sparse, world_size, 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sparse_attention_equals_one_process_in_most_cases(world_size):
    run_distributed(check_sparse, world_size, 40, timeout=500.0)


def check_sparse(how_many: int):
    """So many cases of each way to share a sequence; every second one has all that scores may have."""
    rich = {"scores": {"softcap": 3.0, "alibi": True, "relative": True}, "sinks": True}
    cases = list(itertools.product(KINDS, DOCUMENTS, STRIDES))
    with patch.dict(MASKS, {name: {"window": w, "stride": s} for name, (w, s) in STRIDES.items()}):
        for way in ways(dist.get_world_size()):
            axes = {name: way[name] for name in ("ulysses", "ranks_per_node") if name in way}
            mesh = Mesh.build(context=dist.get_world_size(), **axes)
            for n, (layout, documents, mask) in enumerate(random.Random(str(way)).sample(cases, how_many)):
                rules = rich if n % 2 else {"kernel": "blockwise"}
                check_case(Case(layout=layout, documents=documents, mask=mask, **rules, **way), mesh, EXACT)


# --- models ---------------------------------------------------------------------------------------------------------

MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    layers=("linear", "sparse", "full", "window"),
    window=5,
    sparse_stride=7,
    init_std=0.2,
)
LAYOUTS = ("contiguous", "zigzag", "balanced")


def batch_of(config: ModelConfig):
    return packed_batch(rows=2, seq_len=48, vocab_size=config.vocab_size, seed=3).flatten_rows()


def run(decoder: Decoder, batch) -> dict[str, torch.Tensor]:
    """Hidden states, and this rank's part of every gradient."""
    hidden = decoder(batch.tokens, batch.positions, batch.cu_seqlens)
    hidden.sin().sum().backward()
    grads = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    return {"hidden": hidden.detach()} | grads


@pytest.mark.parametrize("world_size", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
@on_ranks("world_size")
def test_models_of_all_kinds_equal_one_process():
    world, batch = dist.get_world_size(), batch_of(MODEL)
    want = run(Decoder(MODEL, {"softmax": LocalAttention("blockwise")}).double(), batch)
    for ulysses, layout, keep in itertools.product((1, 2), LAYOUTS, ("all", "attention")):
        if world % ulysses or (layout != "zigzag" and (ulysses > 1 or keep != "all")):
            continue
        mesh = Mesh.build(context=world, ulysses=ulysses)
        model = build_parallel_model(MODEL, mesh, layout=layout, kernel="blockwise", execution=Execution(keep))
        whole = SequenceLayout.build(layout, 96, world, batch.cu_seqlens.tolist(), ulysses)
        got = run(
            model.network.double(), batch.map_tokens(lambda x, whole=whole, mesh=mesh: whole.split(x, mesh.rank, 1))
        )
        for name, expected in want.items():
            if name == "hidden":
                expected = whole.split(expected, mesh.rank, 1)
            elif world > 1:
                dist.all_reduce(got[name])
            size = max(expected.abs().max().item(), 1e-3)
            error = (got[name] - expected).abs().max().item() / size
            assert error <= 1e-12, f"{name}, {layout}, ulysses {ulysses}, keep {keep}: {error:.1e}"


@on_ranks(4)
def test_recomputed_layers_send_nothing():
    """As many messages with recomputation as without, in linear layers alone and in all kinds together."""
    for layers in (("linear",), MODEL.layers):
        counts = [count_messages(layers, keep=keep) for keep in ("all", "attention")]
        (plain, grads), (again, same) = counts
        assert again == plain > 0, f"{layers}: {again} messages, {plain} without recomputation"
        assert all(torch.equal(grads[name], same[name]) for name in grads)


def count_messages(layers: tuple[str, ...], *, keep: Keep) -> tuple[int, dict[str, torch.Tensor]]:
    """(messages of forward and backward, what ``run`` found)."""
    wanted = {"window": 5 if {"sparse", "window"} & set(layers) else 0, "sparse_stride": 7 * ("sparse" in layers)}
    config = ModelConfig(**{**vars(MODEL), "layers": layers, **wanted})
    mesh, batch, sent = Mesh.build(context=4), batch_of(MODEL), [0]
    model = build_parallel_model(config, mesh, layout="zigzag", kernel="blockwise", execution=Execution(keep))
    layout = SequenceLayout.build("zigzag", 96, 4)
    mine = batch.map_tokens(lambda x: layout.split(x, mesh.rank, 1))

    def counted(function):
        def call(*args, **kwargs):
            sent[0] += 1
            return function(*args, **kwargs)

        return call

    for name in SENDING:
        patch.object(dist, name, counted(getattr(dist, name))).start()
    try:
        found = run(model.network, mine)
    finally:
        patch.stopall()
    return sent[0], found


@on_ranks(2)
def test_a_second_backward_through_recomputed_linear_layers_is_refused():
    mesh, batch = Mesh.build(context=2), batch_of(MODEL)
    config = ModelConfig(**{**vars(MODEL), "layers": ("linear",), "window": 0, "sparse_stride": 0})
    model = build_parallel_model(config, mesh, layout="zigzag", execution=Execution("attention"))
    layout = SequenceLayout.build("zigzag", 96, 2)
    mine = batch.map_tokens(lambda x: layout.split(x, mesh.rank, 1))
    hidden = model.network(mine.tokens, mine.positions, mine.cu_seqlens)
    hidden.sum().backward(retain_graph=True)
    with pytest.raises(ConfigError, match="second one through the"):
        hidden.sum().backward()


# --- refusals -------------------------------------------------------------------------------------------------------


def test_striped_layouts_do_not_serve_linear_layers():
    mesh = Mesh(rank=0, world_size=2, context=2)
    with pytest.raises(ConfigError, match=r"parallel.layout='striped'(.|\n)*zigzag"):
        build_parallel_model(MODEL, mesh, layout="striped")
    flags = {"parallel": {"context": 2, "layout": "striped"}, "model": {"layers": ["linear", "full"]}}
    with pytest.raises(ConfigError, match=r"parallel.layout='striped'(.|\n)*zigzag"):
        check_run(from_values(flags), 2)
    check_run(from_values({**flags, "parallel": {"context": 2, "layout": "zigzag"}}), 2)


def test_another_cache_is_refused():
    mesh = Mesh(rank=0, world_size=2, context=2)
    decoder = build_parallel_model(MODEL, mesh, layout="zigzag").network
    q = torch.zeros(1, 2, 2, 4)
    for core in decoder.cores.values():
        with pytest.raises(ConfigError, match="none of these 2 ranks' own"):
            attend_once(core, q, q, q, AttentionMask((0, 4)), cache=KVCache())

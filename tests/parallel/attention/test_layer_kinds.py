"""Sparse and linear layers over ranks: values and every gradient, and what is sent."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from launcher.config.load_config import config_from_values
from launcher.config.run_config_rules import check_run
from longctx.architecture.mixers.image_window_mixer import ImageWindowMixer
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.model.attention.kv_cache import KVCache
from longctx.model.attention.local import LocalAttention
from longctx.model.attention.mask import AttentionMask
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution
from parallel.layout.sequence import KINDS, SequenceLayout
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from tests.helpers import on_ranks, run_distributed
from tests.longctx.attention_cores import attend_once
from tests.oracles import packed_batch
from tests.parallel.attention.attention_cases import DOCUMENTS, MASKS, Case, check_case
from tests.parallel.attention.test_attention import EXACT, ways
from tests.parallel.attention.test_recompute import count_messages

# --- attention ------------------------------------------------------------------------------------------------------

STRIDES = {"1/1": (1, 1), "2/5": (2, 5), "5/1": (5, 1), "3/7": (3, 7), "7/4": (7, 4), "4/8": (4, 8), "11/60": (11, 60)}
"""(window, stride): one, primes, multiples of the degree, larger than the documents."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world_size", "how_many"), [(1, 4), (3, 4), *(pytest.param(n, 40, marks=pytest.mark.slow) for n in (1, 2, 3, 4))]
)
def test_sparse_attention_equals_one_process(world_size, how_many):
    run_distributed(check_sparse, world_size, how_many, timeout=500.0)


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
HYBRID = replace(
    MODEL,
    layers=("gated_delta", "full"),
    window=0,
    sparse_stride=0,
    delta_value_heads=8,
    delta_key_dim=6,
    delta_value_dim=5,
    delta_negative=True,
    attention_gate=True,
)
KIMI = replace(MODEL, layers=("kda", "kda", "full"), window=0, sparse_stride=0, delta_key_heads=2)
LAYOUTS = ("contiguous", "zigzag", "balanced")


def batch_of(config: ModelConfig):
    return packed_batch(rows=2, seq_len=48, vocab_size=config.vocab_size, seed=3).flatten_rows()


def run(decoder: Decoder, batch) -> dict[str, torch.Tensor]:
    """Hidden states, and this rank's part of every gradient."""
    hidden = decoder(batch.tokens, batch.positions, batch.cu_seqlens)
    hidden.sin().sum().backward()
    grads = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    return {"hidden": hidden.detach()} | grads


@pytest.mark.few(1)
@pytest.mark.parametrize("model", [MODEL, HYBRID, KIMI], ids=["attention", "hybrid", "kimi"])
@pytest.mark.parametrize("world_size", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
@on_ranks("world_size")
def test_models_of_all_kinds_equal_one_process(model):
    world, batch = dist.get_world_size(), batch_of(model)
    want = run(Decoder(model, {"softmax": LocalAttention("blockwise")}).double(), batch)
    for ulysses, layout, keep in itertools.product((1, 2), LAYOUTS, ("all", "attention")):
        if world % ulysses or (layout != "zigzag" and (ulysses > 1 or keep != "all")):
            continue
        mesh = Mesh.build(context=world, ulysses=ulysses)
        built = build_parallel_model(model, mesh, layout=layout, kernel="blockwise", execution=Execution(keep))
        whole = SequenceLayout.build(layout, 96, world, batch.cu_seqlens.tolist(), ulysses)
        got = run(
            built.network.double(), batch.map_tokens(lambda x, whole=whole, mesh=mesh: whole.split(x, mesh.rank, 1))
        )
        for name, expected in want.items():
            if name == "hidden":
                expected = whole.split(expected, mesh.rank, 1)
            elif world > 1:
                dist.all_reduce(got[name])
            size = max(expected.abs().max().item(), 1e-3)
            error = (got[name] - expected).abs().max().item() / size
            assert error <= 1e-12, f"{name}, {layout}, ulysses {ulysses}, keep {keep}: {error:.1e}"


@on_ranks(2)
def test_hybrids_take_all_heads_at_once_as_on_a_gpu():
    mesh, batch = Mesh.build(context=2), batch_of(HYBRID)
    layout = SequenceLayout.build("zigzag", 96, 2, batch.cu_seqlens.tolist())
    mine, found = batch.map_tokens(lambda x: layout.split(x, mesh.rank, 1)), []
    for is_on_cpu in (True, False):
        built = build_parallel_model(
            HYBRID, mesh, layout="zigzag", kernel="blockwise", execution=Execution("attention")
        )
        with patch("parallel.attention.context_parallel_gated_delta.on_cpu", lambda _, is_on_cpu=is_on_cpu: is_on_cpu):
            found.append(run(built.network.double(), mine))
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-11, atol=1e-13, msg=name)


LINEAR = replace(MODEL, layers=("linear",), window=0, sparse_stride=0)


@on_ranks(4)
def test_recomputed_layers_send_nothing():
    """As many messages with recomputation as without, in linear layers alone and in all kinds together."""
    for config in (LINEAR, MODEL, HYBRID):
        counts = [count_messages({"transport": "p2p"}, keep=keep, config=config) for keep in ("all", "attention")]
        (plain, _, grads), (again, _, same) = counts
        assert again == plain > 0, f"{config.layers}: {again} messages, {plain} without recomputation"
        assert all(torch.equal(grads[name], same[name]) for name in grads)


@on_ranks(2)
def test_a_second_backward_through_recomputed_linear_layers_is_refused():
    mesh, batch = Mesh.build(context=2), batch_of(MODEL)
    model = build_parallel_model(LINEAR, mesh, layout="zigzag", execution=Execution("attention"))
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
        check_run(config_from_values(flags), 2)
    check_run(config_from_values({**flags, "parallel": {"context": 2, "layout": "zigzag"}}), 2)


def test_another_cache_is_refused():
    mesh = Mesh(rank=0, world_size=2, context=2)
    decoder = build_parallel_model(MODEL, mesh, layout="zigzag").network
    q = torch.zeros(1, 2, 2, 4)
    # Windows of images are not causal: they have no cache.
    for core in [core for name, core in decoder.cores.items() if name != ImageWindowMixer.core]:
        with pytest.raises(ConfigError, match="not created for these 2 ranks"):
            attend_once(core, q, q, q, AttentionMask((0, 4)), cache=KVCache())

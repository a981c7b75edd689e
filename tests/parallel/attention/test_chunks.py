"""Layers by chunks over ranks: every layout, transport and kind of layer, in float64, against one process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longctx.config import ModelConfig
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.causal_lm import CausalLM
from parallel.layout.sequence import KINDS, SequenceLayout
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from tests.helpers import run_distributed, tensors_in_cycles
from tests.longctx.samples import gradients
from tests.oracles import packed_batch
from tests.parallel.attention.test_attention import ways

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 8,
    "ffn_size": 48,
    "residual_dropout": 0.1,
}
MODELS = {
    "softmax": ModelConfig(
        **SIZES, layers=("full", "window", "sparse"), window=13, sparse_stride=5, num_layers=3, sinks=True
    ),
    "linear": ModelConfig(**SIZES, layers=("linear", "full"), num_layers=2),
    "gated delta": ModelConfig(**SIZES, layers=("gated_delta", "kda", "full"), num_layers=3),
    "mamba": ModelConfig(**SIZES, layers=("mamba2", "full"), num_layers=2, delta_key_heads=1, delta_value_heads=4),
    # Four groups of heads share two key heads.
    "bias": ModelConfig(**SIZES | {"num_kv_heads": 2}, layers=("full",), num_layers=2, position="t5"),
    # What an expert drops depends on all chunks of all ranks.
    "capacity": ModelConfig(
        **SIZES, num_layers=2, num_experts=4, expert_ffn_size=24, capacity_factor=1.0, router_jitter=0.1
    ),
}
TOKENS = 240
CHUNKS = ((1, 1), (7, 2), (29, 4), (1000, 1))
"""(tokens of a chunk, groups of heads): one, primes, more than there are."""


def batch_of_documents():
    return packed_batch(rows=1, seq_len=TOKENS, vocab_size=64, seed=5)


def step(lm: CausalLM, batch) -> tuple[float, dict[str, Tensor]]:
    """Σ loss and gradients of one rank."""
    loss = lm.loss_sum(lm(batch, TrainingPass(seed=3)))
    loss["objective"].backward()
    return float(loss["nll"]), gradients(lm)


def alone(config: ModelConfig) -> tuple[float, dict[str, Tensor]]:
    lm = CausalLM(Decoder(config)).double()
    return step(lm, batch_of_documents())


def check(world_size: int, name: str, layouts: tuple[str, ...], stride: int = 1) -> None:
    """Each way and layout by the next chunks, ``keep`` and ``store``; a ``stride`` leaves some of these out."""
    config = MODELS[name]
    wanted_loss, wanted = alone(config)
    every = itertools.cycle(itertools.product(CHUNKS, ("attention", "inputs", "all"), ("device", "host")))
    chunks = itertools.islice(every, None, None, stride)
    for way, kind in itertools.product(ways(world_size), layouts):
        (chunk_tokens, head_groups), keep, store = next(chunks)
        ulysses = way.get("ulysses", 1)
        if (config.num_heads // head_groups) % ulysses:
            head_groups = 1
        axes = {name: way[name] for name in ("ulysses", "ranks_per_node") if name in way}
        mesh = Mesh.build(context=world_size, **axes)
        execution = Execution(keep, store, chunk_tokens=chunk_tokens, head_groups=head_groups)
        lm = build_parallel_model(config, mesh, layout=kind, transport=way["transport"], execution=execution).double()
        batch = batch_of_documents()
        layout = SequenceLayout.build(kind, TOKENS, world_size, batch.cu_seqlens, ulysses)
        shard = batch.map_tokens(lambda x, layout=layout, mesh=mesh: layout.split(x, mesh.context_rank, 1))
        loss, grads = step(lm, shard)
        total = torch.tensor([loss], dtype=torch.float64)
        dist.all_reduce(total)
        where = f"{name}, {way}, {kind}, {execution}"
        torch.testing.assert_close(float(total), wanted_loss, rtol=1e-12, atol=0, msg=where)
        for parameter, grad in grads.items():
            dist.all_reduce(grad)
            text = f"{where}: {parameter}"
            torch.testing.assert_close(grad, wanted[parameter], rtol=1e-9, atol=1e-11, msg=text)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "layout"), [("softmax", "balanced"), pytest.param("capacity", "striped", marks=pytest.mark.slow)]
)
def test_chunks_over_ranks_give_one_process_gradients(name, layout):
    run_distributed(check, 2, 2, name, (layout,), 7, timeout=250)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_give_one_process_gradients_in_every_way_and_layout(world_size, name):
    layouts = KINDS
    if name in ("linear", "gated delta", "mamba"):
        layouts = tuple(kind for kind in KINDS if kind != "striped")
    run_distributed(check, world_size, world_size, name, layouts, timeout=850)


def check_frees(world_size: int) -> None:
    mesh = Mesh.build(context=world_size)
    batch = batch_of_documents()
    layout = SequenceLayout.build("zigzag", TOKENS, world_size, batch.cu_seqlens)
    shard = batch.map_tokens(lambda x: layout.split(x, mesh.context_rank, 1))
    for name, keep, chunk_tokens in itertools.product(MODELS, ("all", "attention", "inputs"), (0, 29)):
        execution = Execution(keep, chunk_tokens=chunk_tokens, head_groups=2 if chunk_tokens else 1)
        lm = build_parallel_model(MODELS[name], mesh, layout="zigzag", execution=execution)
        # The first step of a process imports.
        step(lm, shard)
        left = tensors_in_cycles(lambda lm=lm: step(lm, shard))
        assert not left, f"{name}, {execution}: {left}"


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_memory_of_a_step_is_free_behind_it_without_garbage_collection():
    run_distributed(check_frees, 2, 2, timeout=180)

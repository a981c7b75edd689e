"""Adapters over ranks: every gradient against one process, and training in all ZeRO stages with a frozen base."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import cycle, product

import pytest
import torch

from longctx.architecture.adapter import AdapterShape
from longctx.batch import Batch
from longctx.config import ModelConfig
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution
from longctx.objectives.causal_lm import CausalLM
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from tests.helpers import on_ranks
from tests.longctx.samples import dense_config, packed_batch, tiny_config
from tests.parallel.trained import OPTIONS, ROWS, train_alone, train_over_ranks

ADAPTER = AdapterShape(rank=3, alpha=6.0)
MODELS: dict[str, ModelConfig] = {
    "dense": dense_config(adapter=ADAPTER, init_std=0.05),
    "experts": tiny_config(adapter=ADAPTER, init_std=0.05, num_experts=4),
    "hybrid": dense_config(adapter=ADAPTER, layers=("gated_delta", "full"), init_std=0.05),
    "few": dense_config(adapter=replace(ADAPTER, targets=("q_proj", "mlp.down_proj")), init_std=0.05),
}
LENGTHS = [[19, 12, 7]]
ROW_TOKENS, CLIP = 48, 0.05


def row(seed: int) -> Batch:
    return packed_batch(LENGTHS, padding=10, seed=seed)


def split(batch: Batch, mesh: Mesh, layout: str) -> Batch:
    place = SequenceLayout.build(layout, ROW_TOKENS, mesh.context, batch.documents, mesh.ulysses)
    return replace(batch.map_tokens(lambda x: place.split(x, mesh.context_rank, 1)), placement=place)


def rows_of(number: int) -> list[Batch]:
    return [row(ROWS * number + k) for k in range(ROWS)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["dense", "experts", "few"])
@pytest.mark.parametrize(
    ("world_size", "context", "stages"),
    [
        (2, 2, (0, 3)),
        *(
            pytest.param(n, c, (0, 1, 2, 3), marks=pytest.mark.slow)
            for n, c in ((1, 1), (2, 2), (3, 3), (4, 2), (4, 4))
        ),
    ],
)
@on_ranks("world_size", timeout=500)
def test_every_stage_trains_like_one_process(name, context, stages):
    config = MODELS[name]
    wanted = train_alone(randomized(CausalLM(Decoder(config))), rows_of, clip_norm=CLIP)
    mesh = Mesh.build(context=context)
    cut = partial(split, mesh=mesh, layout="zigzag")
    for (stage, chunk_tokens), keep in zip(product(stages, (7, 0)), cycle(("attention", "all", "inputs"))):
        execution = Execution(keep, chunk_tokens=chunk_tokens)
        model = randomized(build_parallel_model(config, mesh, layout="zigzag", execution=execution))
        got = train_over_ranks(model, mesh, rows_of, cut, stage=stage, options=replace(OPTIONS, clip_norm=CLIP))
        got.check(wanted, 3e-7, f"ZeRO {stage}, context {context}, {keep}")


def randomized(task):
    """B starts at 0, which would hide A's gradient."""
    network, generator = task.network, torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in network.named_parameters():
            if name.endswith("lora_B"):
                whole = 0.1 * torch.randn(network.logical_shape(name, p.shape), generator=generator)
                own = slice(None) if whole.shape == p.shape else network.dispatcher.local_experts
                p.copy_(whole[own])
    return task


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world_size", "context", "expert", "stages"),
    [
        (2, 1, 2, (1,)),
        *(pytest.param(n, c, e, (0, 1, 2, 3), marks=pytest.mark.slow) for n, c, e in ((2, 2, 2), (4, 2, 2), (4, 1, 4))),
    ],
)
@on_ranks("world_size", timeout=500)
def test_experts_across_ranks_have_their_own_adapters(context, expert, stages):
    config = MODELS["experts"]
    wanted = train_alone(randomized(CausalLM(Decoder(config))), rows_of, clip_norm=CLIP)
    mesh = Mesh.build(context=context, expert=expert)
    for stage in stages:
        model = randomized(build_parallel_model(config, mesh, layout="zigzag"))
        cut, options = partial(split, mesh=mesh, layout="zigzag"), replace(OPTIONS, clip_norm=CLIP)
        got = train_over_ranks(model, mesh, rows_of, cut, stage=stage, options=options)
        got.check(wanted, 3e-7, f"ZeRO {stage}, context {context}, experts {expert}")

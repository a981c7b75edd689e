"""Models with an encoder over ranks: every gradient against one process, and training in all ZeRO stages."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from longctx.batch import Batch
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.causal_lm import CausalLM
from parallel.layout.sequence import KINDS, SequenceLayout
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from tests.helpers import on_ranks, run_distributed
from tests.longctx.pairs import pair_batch
from tests.longctx.samples import dense_config, gradients, randomize
from tests.parallel.attention.test_attention import ways
from tests.parallel.trained import ROWS, train_alone, train_over_ranks

BOTH = {"num_layers": 2, "encoder_layers": 2, "residual_dropout": 0.1}
MODELS = {
    "rope": dense_config(**BOTH),
    "t5": dense_config(**BOTH, position="t5", qkv_bias=False),
    "windows": dense_config(**BOTH, layers=("window", "full"), window=3, norm_order="post", position="learned"),
    "sparse, linear": dense_config(**BOTH, layers=("sparse", "linear"), window=2, sparse_stride=3),
}
PACKED = ((5, 9), (1, 4), (0, 3), (7, 0), (6, 13), (21, 17))
"""Tokens of both sides; with padding they are 48 and 72, which 1 to 4 ranks divide in every layout."""
SETS = {"packed": PACKED, "one pair": ((48, 60),), "short sides": ((1, 55), (40, 1), (0, 2))}


def batch_of(name: str, seed: int = 0) -> Batch:
    pairs = SETS[name]
    missing = (48 - sum(target for target, _ in pairs), 72 - sum(source for _, source in pairs))
    return pair_batch(pairs, vocab=97, padding=missing, seed=seed)


def split(batch: Batch, mesh: Mesh, layout: str, source_layout: str) -> Batch:
    """This rank's tokens of both sides, each in a layout of its own."""
    own = SequenceLayout.build(layout, 48, mesh.context, batch.documents, mesh.ulysses)
    theirs = SequenceLayout.build(source_layout, 72, mesh.context, batch.source.documents, mesh.ulysses, causal=False)
    source = batch.source.map_tokens(lambda x: theirs.split(x, mesh.context_rank, 1))
    mine = batch.map_tokens(lambda x: own.split(x, mesh.context_rank, 1))
    return replace(mine, placement=own, source=replace(source, placement=theirs))


def step(lm: CausalLM, batch: Batch) -> dict[str, torch.Tensor]:
    """The loss's sum and every gradient of it, of one rank."""
    randomize(lm)
    sums = lm.loss_sum(lm.double()(batch, TrainingPass(seed=3)))
    sums["objective"].backward()
    return {"loss": sums["objective"].detach(), **gradients(lm)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world_size", "how_many"), [(3, 1), *(pytest.param(n, 30, marks=pytest.mark.slow) for n in (1, 2, 3, 4))]
)
def test_every_layout_of_either_side_gives_the_gradients_of_one_process(world_size, how_many):
    run_distributed(check_models, world_size, how_many, timeout=500.0)


def check_models(how_many: int):
    """So many cases of each way to share sequences."""
    world, wanted = dist.get_world_size(), {}
    cases = list(itertools.product(MODELS, SETS, KINDS, KINDS, ("all", "attention", "inputs"), (0, 5)))
    for way in ways(world):
        axes = {name: way[name] for name in ("ulysses", "ranks_per_node") if name in way}
        mesh = Mesh.build(context=world, **axes)
        for name, kind, layout, source_layout, keep, chunk_tokens in random.Random(str(way)).sample(cases, how_many):
            if "striped" in (layout, source_layout) and "linear" in name:
                continue
            if (name, kind) not in wanted:
                wanted[name, kind] = step(CausalLM(Decoder(MODELS[name])), batch_of(kind))
            model = build_parallel_model(
                MODELS[name],
                mesh,
                layout=layout,
                kernel="blockwise",
                transport=way.get("transport", "auto"),
                execution=Execution(keep, chunk_tokens=chunk_tokens),
            )
            got = step(model, split(batch_of(kind), mesh, layout, source_layout))
            # A gradient that is 0 in theory (a source of one token has one key) is the rounding of others' sizes.
            least = 1e-3 * max(value.abs().max() for key, value in wanted[name, kind].items() if key != "loss")
            for key, value in wanted[name, kind].items():
                if world > 1:
                    dist.all_reduce(got[key])
                error = (got[key] - value).abs().max() / value.abs().max().clamp(min=least)
                assert error <= 1e-12, f"{name}, {kind}, {layout} × {source_layout}, {way}, {keep}: {key} {error}"


TRAINED = replace(MODELS["rope"], residual_dropout=0.0, init_std=0.05)


def rows_of(number: int) -> list[Batch]:
    return [batch_of("packed", seed=ROWS * number + row) for row in range(ROWS)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world_size", "context", "stages"),
    [
        (2, 2, (3,)),
        pytest.param(4, 2, (1,), marks=pytest.mark.slow),
        *(
            pytest.param(n, c, (0, 1, 2, 3), marks=pytest.mark.slow)
            for n, c in ((1, 1), (2, 2), (3, 3), (4, 2), (4, 4))
        ),
    ],
)
@on_ranks("world_size", timeout=250)
def test_every_stage_trains_like_one_process(context, stages):
    wanted = train_alone(CausalLM(Decoder(TRAINED)), rows_of)
    mesh = Mesh.build(context=context)
    cut = partial(split, mesh=mesh, layout="zigzag", source_layout="contiguous")
    for stage, keep, chunk_tokens in zip(stages, itertools.cycle(("attention", "all", "inputs")), (0, 7, 0, 16)):
        execution = Execution(keep, chunk_tokens=chunk_tokens)
        model = build_parallel_model(TRAINED, mesh, layout="zigzag", execution=execution)
        got = train_over_ranks(model, mesh, rows_of, cut, stage=stage)
        got.check(wanted, 3e-7, f"ZeRO {stage}, context {context}, {keep}")

"""Multi-token prediction over ranks: every gradient against one process, and training in all ZeRO stages."""

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
from longctx.model.training_pass import Execution
from longctx.objectives.build import Objective, build_objective
from longctx.objectives.task import Task, weighed
from parallel.layout.sequence import KINDS, SequenceLayout
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from tests.helpers import on_ranks, run_distributed
from tests.longctx.samples import ahead, dense_config, gradients, packed_batch, randomize, tiny_config
from tests.parallel.attention.test_attention import ways
from tests.parallel.trained import ROWS, train_alone, train_over_ranks

OBJECTIVE = Objective(mtp_weight=0.3)
MODELS = {
    "dense": dense_config(mtp_layers=2),
    "experts": tiny_config(mtp_layers=1, dense_layers=(0,)),
    "hybrid": dense_config(mtp_layers=1, layers=("gated_delta", "full")),
    "latent": dense_config(mtp_layers=1, num_kv_heads=4, kv_lora_rank=12, rope_head_dim=4, value_head_dim=8),
}
SETS = {"packed": [1, 2, 3, 4, 19, 12], "one": [45], "short": [2] * 22}


def batch_of(name: str, seed: int = 0) -> Batch:
    """48 tokens, which 1 to 4 ranks divide in every layout."""
    lengths = SETS[name]
    return ahead(packed_batch([lengths], padding=48 - sum(lengths), seed=seed))


def split(batch: Batch, mesh: Mesh, layout: str) -> Batch:
    """This rank's tokens."""
    own = SequenceLayout.build(layout, 48, mesh.context, batch.documents, mesh.ulysses)
    return replace(batch.map_tokens(lambda x: own.split(x, mesh.context_rank, 1)), placement=own)


def step(lm: Task, batch: Batch) -> dict[str, torch.Tensor]:
    """The sums of one rank, and every gradient of what it adds to the loss."""
    randomize(lm)
    sums = lm.double().loss_sum(lm(batch))
    weighed(lm.terms, sums, {"targets": 1, "tokens": 1, "ahead": 1}).backward()
    found = {name: sums[name].detach().double() for name in ("objective", "mtp", "mtp_nll")}
    count = torch.tensor(float(batch.num_mtp_targets(lm.network.config.mtp_layers)), dtype=torch.float64)
    return {**found, "count": count, **gradients(lm)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world_size", "how_many"), [(3, 1), *(pytest.param(n, 30, marks=pytest.mark.slow) for n in (1, 2, 3, 4))]
)
def test_every_layout_gives_the_gradients_of_one_process(world_size, how_many):
    run_distributed(check_models, world_size, how_many, timeout=500.0)


def check_models(how_many: int):
    """So many cases of each way to share a sequence."""
    world, wanted = dist.get_world_size(), {}
    cases = list(itertools.product(MODELS, SETS, KINDS, ("all", "attention", "inputs"), (0, 5)))
    for way in ways(world):
        axes = {name: way[name] for name in ("ulysses", "ranks_per_node") if name in way}
        mesh = Mesh.build(context=world, **axes)
        for name, kind, layout, keep, chunk_tokens in random.Random(str(way)).sample(cases, how_many):
            if layout == "striped" and name == "hybrid":
                continue
            if (name, kind) not in wanted:
                wanted[name, kind] = step(build_objective(Decoder(MODELS[name]), OBJECTIVE), batch_of(kind))
            model = build_parallel_model(
                MODELS[name],
                mesh,
                layout=layout,
                kernel="blockwise",
                transport=way.get("transport", "auto"),
                execution=Execution(keep, chunk_tokens=chunk_tokens),
                objective=OBJECTIVE,
            )
            got = step(model, split(batch_of(kind), mesh, layout))
            # A gradient that is 0 in theory (no token is predicted further ahead) is the rounding of others' sizes.
            least = 1e-3 * max(value.abs().max() for value in wanted[name, kind].values())
            for key, value in wanted[name, kind].items():
                if world > 1:
                    dist.all_reduce(got[key])
                error = (got[key] - value).abs().max() / value.abs().max().clamp(min=least)
                assert error <= 1e-12, f"{name}, {kind}, {layout}, {way}, {keep}, {chunk_tokens}: {key} {error}"


TRAINED = dense_config(mtp_layers=2, tie_embeddings=False, init_std=0.05)


def rows_of(number: int) -> list[Batch]:
    return [batch_of("packed", seed=ROWS * number + row) for row in range(ROWS)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world_size", "context", "stages"),
    [
        (2, 2, (3,)),
        *(
            pytest.param(n, c, (0, 1, 2, 3), marks=pytest.mark.slow)
            for n, c in ((1, 1), (2, 2), (3, 3), (4, 2), (4, 4))
        ),
    ],
)
@on_ranks("world_size", timeout=250)
def test_every_stage_trains_like_one_process(context, stages):
    wanted = train_alone(build_objective(Decoder(TRAINED), OBJECTIVE), rows_of)
    mesh = Mesh.build(context=context)
    cut = partial(split, mesh=mesh, layout="zigzag")
    for stage, keep, chunk_tokens in zip(stages, itertools.cycle(("attention", "all", "inputs")), (7, 0, 0, 16)):
        execution = Execution(keep, chunk_tokens=chunk_tokens)
        model = build_parallel_model(TRAINED, mesh, layout="zigzag", execution=execution, objective=OBJECTIVE)
        got = train_over_ranks(model, mesh, rows_of, cut, stage=stage)
        got.check(wanted, 3e-7, f"ZeRO {stage}, context {context}, {keep}")

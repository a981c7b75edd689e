"""Preferences over ranks: training in all ZeRO stages like one process, with replies that several ranks share."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from longctx.batch import Batch
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution
from longctx.objectives.build import Objective, build_objective
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from tests.helpers import on_ranks
from tests.longctx.objectives.test_preferences import OPTIONS as LOSSES
from tests.longctx.objectives.test_preferences import packed
from tests.longctx.samples import dense_config, tiny_config
from tests.parallel.trained import OPTIONS, ROWS, train_alone, train_over_ranks

MODELS = {"dense": dense_config(init_std=0.05), "experts": tiny_config(init_std=0.05)}
CLIP = 0.01


def rows_of(number: int, *, shared: bool = False) -> list[Batch]:
    return [packed(shared=shared, seed=ROWS * number + k) for k in range(ROWS)]


def split(batch: Batch, mesh: Mesh) -> Batch:
    place = SequenceLayout.build("zigzag", batch.documents.num_tokens, mesh.context, batch.documents, mesh.ulysses)
    return replace(batch.map_tokens(lambda x: place.split(x, mesh.context_rank, 1)), placement=place)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world_size", "context", "names", "stages"),
    [
        (2, 2, ("dpo", "kto"), (3,)),
        *(
            pytest.param(n, c, tuple(LOSSES), (0, 1, 2, 3), marks=pytest.mark.slow)
            for n, c in ((1, 1), (2, 2), (3, 3), (4, 2), (4, 4))
        ),
    ],
)
@on_ranks("world_size", timeout=500)
def test_every_loss_trains_like_one_process(context, names, stages):
    mesh = Mesh.build(context=context)
    for model, config in MODELS.items():
        for name in names:
            objective = Objective("preferences", preference=LOSSES[name])
            wanted = train_alone(build_objective(Decoder(config), objective), rows_of, clip_norm=CLIP)
            for stage in stages:
                execution = Execution("inputs", chunk_tokens=7 * (stage % 2))
                task = build_parallel_model(config, mesh, layout="zigzag", execution=execution, objective=objective)
                options = replace(OPTIONS, clip_norm=CLIP)
                got = train_over_ranks(task, mesh, rows_of, partial(split, mesh=mesh), stage=stage, options=options)
                got.check(wanted, 3e-7, f"{model}, {name}, ZeRO {stage}, context {context}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [2])
@on_ranks("world_size", timeout=200)
def test_ranks_with_rows_of_their_own_share_prompts():
    mesh, config = Mesh.build(context=1), MODELS["dense"]
    objective = Objective("preferences", preference=LOSSES["dpo"])
    wanted = train_alone(build_objective(Decoder(config), objective), rows_of, clip_norm=CLIP)
    for execution in (Execution(), Execution("attention", "host", chunk_tokens=7, head_groups=2)):
        task = build_parallel_model(config, mesh, layout="zigzag", execution=execution, objective=objective)
        options, rows = replace(OPTIONS, clip_norm=CLIP), partial(rows_of, shared=True)
        got = train_over_ranks(task, mesh, rows, partial(split, mesh=mesh), stage=2, options=options)
        got.check(wanted, 3e-7, "shared prompts")

"""Models with an encoder over ranks: every gradient against one process, and training in all ZeRO stages."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from longctx.batch import Batch
from longctx.config import ModelConfig
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.causal_lm import CausalLM
from parallel.comm.world import sum_over_ranks
from parallel.layout.sequence import KINDS, SequenceLayout
from parallel.loss import count_step
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from parallel.zero.optimizer import OptimizerOptions
from parallel.zero.zero_engine import ZeroEngine
from tests.helpers import on_ranks, run_distributed
from tests.longctx.pairs import pair_batch
from tests.longctx.samples import dense_config, gradients, randomize
from tests.parallel.attention.test_attention import ways

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
STEPS, CLIP, LR = 3, 0.5, 1e-3


def step_batches(number: int) -> list[Batch]:
    return [batch_of("packed", seed=4 * number + row) for row in range(4)]


def train_alone(config: ModelConfig) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of each step in one process, by PyTorch's AdamW."""
    lm = CausalLM(Decoder(config))
    groups = [
        {"params": [p for p in lm.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in lm.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for number in range(STEPS):
        batches = step_batches(number)
        sums = [lm.loss_sum(lm(batch)) for batch in batches]
        loss = sum(x["objective"] for x in sums) / sum(batch.num_targets for batch in batches)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(lm.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss))
    return losses, norms


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
    wanted_losses, wanted_norms = train_alone(TRAINED)
    assert min(wanted_norms) > CLIP, "clipping must be active"
    mesh = Mesh.build(context=context)
    for stage, keep, chunk_tokens in zip(stages, itertools.cycle(("attention", "all", "inputs")), (0, 7, 0, 16)):
        execution = Execution(keep, chunk_tokens=chunk_tokens)
        model = build_parallel_model(TRAINED, mesh, layout="zigzag", execution=execution)
        engine = ZeroEngine(
            model,
            stage=stage,
            dtype=torch.float32,
            accumulation=4 // mesh.data,
            options=OptimizerOptions(clip_norm=CLIP),
        )
        losses, norms = [], []
        for number in range(STEPS):
            rows = step_batches(number)[mesh.data_rank :: mesh.data]
            mine = [split(row, mesh, "zigzag", "contiguous") for row in rows]
            counts = count_step(engine.model, mine)
            total = torch.zeros((), dtype=torch.float64)
            for batch in mine:
                loss = engine.forward(batch)
                total += loss["nll"].double()
                engine.backward(engine.model.loss(loss, counts))
            norms.append(engine.step(LR))
            losses.append(float(sum_over_ranks(total)) / counts["targets"])
        for got, want in ((losses, wanted_losses), (norms, wanted_norms)):
            error = max(abs(a - b) / b for a, b in zip(got, want, strict=True))
            assert error <= 3e-7, f"ZeRO {stage}, context {context}, {keep}: {got} instead of {want}"

"""Models of images over ranks: every gradient against one process, and training in all ZeRO stages."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from longctx.batch import Batch, Stream
from longctx.config import ModelConfig
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.build import Objective, build_objective
from longctx.objectives.task import Task
from parallel.layout.sequence import KINDS, SequenceLayout
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from tests.helpers import on_ranks, run_distributed
from tests.longctx.image_samples import PATCHES, igpt_config, image_stream, swin_config, vit_config
from tests.longctx.samples import gradients, randomize
from tests.parallel.attention.test_attention import ways
from tests.parallel.trained import ROWS, train_alone, train_over_ranks

DENSE = {"num_experts": 0, "shared_ffn_size": 0}
CLASSES, BOTH = Objective("classes", label_smoothing=0.1), Objective("causal", class_weight=0.7)
MODELS: dict[str, tuple[ModelConfig, Objective]] = {
    "class token": (vit_config(**DENSE, residual_dropout=0.1), CLASSES),
    "means": (vit_config(replace(PATCHES, class_token=False), **DENSE, class_pool="mean", max_positions=15), CLASSES),
    "means of experts": (vit_config(class_pool="mean"), CLASSES),
    "windows": (swin_config(), CLASSES),
    "pixels": (igpt_config(), Objective("causal")),
    "classes of pixels": (
        igpt_config(**DENSE, classes=5, class_pool="mean", class_bias=False, token_head=False, output_vocab_size=0),
        CLASSES,
    ),
    "pixels and classes": (igpt_config(**DENSE, classes=5, class_pool="mean"), BOTH),
}
ROW_TOKENS = 96
"""Tokens of a row of five or six images with its padding, which 1 to 4 ranks divide in every layout."""


def stream_of(config: ModelConfig, seed: int = 0) -> Stream:
    count = 5
    # Windows need complete images, of padding too.
    row = 7 * 72 if config.image.window else ROW_TOKENS
    return image_stream(config, count, padding=row - count * config.image.num_tokens, seed=seed)[0]


def split(stream: Stream, mesh: Mesh, layout: str, *, causal: bool) -> Stream:
    """This rank's tokens."""
    place = SequenceLayout.build(
        layout, stream.documents.num_tokens, mesh.context, stream.documents, mesh.ulysses, causal=causal
    )
    return replace(stream.map_tokens(lambda x: place.split(x, mesh.context_rank, 1)), placement=place)


def step(task: Task, stream: Stream) -> dict[str, torch.Tensor]:
    """All sums, and every gradient of the loss for counts of 10, of one rank."""
    randomize(task)
    sums = task.loss_sum(task.double()(task.prepare(stream), TrainingPass(seed=3)))
    task.loss(sums, dict.fromkeys(("targets", "labels", "tokens"), 10)).backward()
    return {**{name: x.detach().double() for name, x in sums.sums.items()}, **gradients(task)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world_size", "how_many"), [(3, 3), *(pytest.param(n, 40, marks=pytest.mark.slow) for n in (1, 2, 3, 4))]
)
def test_every_layout_gives_the_gradients_of_one_process(world_size, how_many):
    run_distributed(check_models, world_size, how_many, timeout=500.0)


def check_models(how_many: int, names: tuple[str, ...] = tuple(MODELS)):
    """So many cases of each way to share sequences."""
    world, wanted = dist.get_world_size(), {}
    cases = list(itertools.product(names, KINDS, ("all", "attention", "inputs"), (0, 5)))
    for way in ways(world):
        axes = {name: way[name] for name in ("ulysses", "ranks_per_node") if name in way}
        mesh = Mesh.build(context=world, **axes)
        for name, layout, keep, chunk_tokens in random.Random(str(way)).sample(cases, how_many):
            config, objective = MODELS[name]
            if name not in wanted:
                wanted[name] = step(build_objective(Decoder(config), objective), stream_of(config))
            model = build_parallel_model(
                config,
                mesh,
                layout=layout,
                kernel="blockwise",
                transport=way.get("transport", "auto"),
                execution=Execution(keep, chunk_tokens=chunk_tokens),
                objective=objective,
            )
            got = step(model, split(stream_of(config), mesh, layout, causal=config.causal))
            # A gradient that is 0 in theory (a bias of keys without rotation) is the rounding of others' sizes.
            least = 1e-3 * max(value.abs().max() for key, value in wanted[name].items() if "." in key)
            for key, value in wanted[name].items():
                if world > 1:
                    dist.all_reduce(got[key])
                error = (got[key] - value).abs().max() / value.abs().max().clamp(min=least)
                assert error <= 1e-12, f"{name}, {layout}, {way}, {keep}, {chunk_tokens}: {key} {error}"


def rows_of(config: ModelConfig, number: int) -> list[Stream]:
    return [stream_of(config, seed=ROWS * number + row) for row in range(ROWS)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["class token", "means", "windows", "pixels and classes"])
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
@on_ranks("world_size", timeout=500)
def test_every_stage_trains_like_one_process(name, context, stages):
    config, objective = MODELS[name]
    config = replace(config, residual_dropout=0.0, init_std=0.05)
    rows = partial(rows_of, config)
    wanted = train_alone(build_objective(Decoder(config), objective), rows)
    mesh = Mesh.build(context=context)
    cut = partial(split, mesh=mesh, layout="zigzag", causal=config.causal)
    for stage, keep, chunk_tokens in zip(stages, itertools.cycle(("attention", "all", "inputs")), (7, 0, 16, 0)):
        execution = Execution(keep, chunk_tokens=chunk_tokens)
        model = build_parallel_model(config, mesh, layout="zigzag", execution=execution, objective=objective)
        got = train_over_ranks(model, mesh, rows, cut, stage=stage)
        got.check(wanted, 3e-7, f"ZeRO {stage}, context {context}, {keep}")


def test_the_batch_is_padded_and_split_with_its_pixels():
    config = MODELS["class token"][0]
    whole = stream_of(config).padded(ROW_TOKENS + 7)
    assert isinstance(whole, Stream)
    assert not isinstance(whole, Batch)
    assert whole.pixels is not None
    assert whole.pixels.shape == (1, ROW_TOKENS + 7, PATCHES.pixel_bytes)
    assert not whole.pixels[0, -7:].any()
    assert whole.num_labels == 5


def rank_of_tokens(images: int, rows: int, columns: int, side: int, shift: int, degree: int) -> list[int]:
    """Each patch's rank, in reading order, where windows are dealt out in order: by plain loops."""
    found, across, windows = [], columns // side, images * rows * columns // side**2
    firsts = [rank * windows // degree for rank in range(degree)]
    for image, row, column in itertools.product(range(images), range(rows), range(columns)):
        y, x = (row - shift) % rows // side, (column - shift) % columns // side
        window = image * (rows // side) * across + y * across + x
        found.append(max(rank for rank in range(degree) if firsts[rank] <= window))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_windows_send_the_rows_that_change_ranks_and_no_other(world_size):
    run_distributed(check_rows_sent, world_size)


def check_rows_sent():
    world, images = dist.get_world_size(), 7
    mesh = Mesh.build(context=world)
    config, objective = MODELS["windows"]
    task = build_parallel_model(config, mesh, layout="zigzag", objective=objective)
    place = SequenceLayout.build("zigzag", images * 72, world, causal=False)
    given = [0] * (images * 72)
    for rank in range(world):
        for token in place.indices(rank).tolist():
            given[token] = rank
    plain, shifted = (rank_of_tokens(images, 6, 12, 3, shift, world) for shift in (0, 1))
    later = rank_of_tokens(images, 3, 6, 3, 0, world)
    # A merged token's four patches go to its rank.
    merged = [later[i // 72 * 18 + i % 72 // 24 * 6 + i % 12 // 2] for i in range(images * 72)]
    steps = [(given, plain), (plain, shifted), (shifted, plain), (plain, merged)]
    wanted = [sum(a == mesh.context_rank != b for a, b in zip(before, after, strict=True)) for before, after in steps]
    sent, send = [], mesh.comm.start_all_to_all

    def counting(x, group, **options):
        sent.append(len(x))
        return send(x, group, **options)

    mesh.comm.start_all_to_all = counting
    stream = split(stream_of(config), mesh, "zigzag", causal=False)
    task(task.prepare(stream))
    assert sent == wanted
    assert sum(sent) > 0

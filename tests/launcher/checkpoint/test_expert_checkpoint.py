"""Checkpoints of models whose experts ranks share out: any expert degree reads what any other wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launcher.checkpoint.background_saver import Saver
from launcher.checkpoint.load_checkpoint import load_checkpoint
from longctx.checkpoint_format import CheckpointReader, find_checkpoint
from longctx.conversion import export_checkpoint, load_hf
from longctx.errors import CheckpointError
from tests.helpers import run_distributed
from tests.longctx.conversion.tiny_tokenizer import train_tokenizer
from tests.longctx.samples import tiny_config
from tests.parallel.experts.expert_cases import CONFIG, RanksRun, Spread, fixed_routing, gather_whole

SAVED, MORE = 2, 2
"""Steps before the checkpoint and after it."""

PUBLISHED = tiny_config(vocab_size=600)
"""A model of a family that Hugging Face knows."""

Ranks = tuple[int, int, int]
"""World size, expert degree, ZeRO stage."""

QUICK: list[tuple[Ranks, Ranks]] = [
    ((2, 2, 1), (4, 4, 3)),
    ((2, 2, 1), (1, 1, 2)),
    ((1, 1, 2), (2, 2, 3)),
]
WRITERS: list[Ranks] = [(2, 2, 1), (2, 2, 3), (1, 1, 2), (4, 2, 2), (4, 4, 3)]
READERS: list[Ranks] = [(4, 4, 0), (1, 1, 3), (2, 2, 0), (2, 2, 2), (4, 2, 1), (4, 2, 3), (4, 4, 1), (4, 4, 2)]


def spread(expert: int, stage: int, seed: int = 0) -> Spread:
    return Spread(context=min(2, dist.get_world_size()), expert=expert, stage=stage, seed=seed)


def write(folder: Path, expert: int, stage: int) -> None:
    """Train, save, train on; ``after`` has what came then."""
    runner, routing = RanksRun(CONFIG, spread(expert, stage)), fixed_routing(SAVED + MORE)
    for step in range(SAVED):
        runner.step(step, routing)
    training = {"step": SAVED}
    files = {"tokenizer.model": b"words"}
    folder.mkdir(exist_ok=True)
    saver = Saver(folder, runner.engine, model=CONFIG, tokenizer_files=files)
    saver.save(step=SAVED, training=training, wait=True)
    whole = gather_whole(runner.owned(), runner.engine.shapes)
    for step in range(SAVED, SAVED + MORE):
        runner.step(step, routing)
    if dist.get_rank() == 0:
        torch.save((whole, runner.run.losses, runner.run.norms), folder / "after")


def read_each(readers: list[tuple[Path, int, int]]) -> None:
    """Take up each checkpoint in an engine that started elsewhere: equal in every bit, it trains on alike."""
    for folder, expert, stage in readers:
        whole, losses, norms = torch.load(folder / "after", weights_only=False)
        runner, routing = RanksRun(CONFIG, spread(expert, stage, seed=7)), fixed_routing(SAVED + MORE)
        load_checkpoint(newest(folder), runner.engine, CONFIG)
        where = f"{folder.name} read at expert {expert}, ZeRO {stage}"
        got = gather_whole(runner.owned(), runner.engine.shapes)
        assert got.keys() == whole.keys(), where
        for key, values in got.items():
            assert torch.equal(values, whole[key]), f"{where}: {key}"
        for step in range(SAVED, SAVED + MORE):
            runner.step(step, routing)
        assert runner.run.losses == pytest.approx(losses[SAVED:], rel=2e-6), where
        assert runner.run.norms == pytest.approx(norms[SAVED:], rel=1e-5), where


def newest(folder: Path) -> Path:
    return folder / "checkpoints" / f"step_{SAVED:06d}"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Callable[[Ranks], Path]:
    """A run with one checkpoint, written by such ranks."""
    base = tmp_path_factory.mktemp("experts")

    @cache
    def run(ranks: Ranks) -> Path:
        folder = base / "_".join(map(str, ranks))
        run_distributed(write, ranks[0], folder, *ranks[1:], timeout=100)
        return folder

    return run


@pytest.mark.timeout(200)
@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 4))])
def test_another_expert_degree_goes_on_from_what_one_wrote(written, world):
    readers = [(written(source), *target[1:]) for source, target in QUICK if target[0] == world]
    run_distributed(read_each, world, readers, timeout=100)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", READERS, ids=str)
def test_every_degree_and_stage_goes_on_from_every_other(written, target):
    world, expert, stage = target
    run_distributed(read_each, world, [(written(source), expert, stage) for source in WRITERS], timeout=500)


def write_for_export(folder: Path) -> None:
    runner = RanksRun(PUBLISHED, Spread(context=2, expert=2, stage=2))
    runner.step(0)
    files = {"tokenizer.model": (folder.parent / "tokenizer.model").read_bytes()}
    folder.mkdir(exist_ok=True)
    saver = Saver(folder, runner.engine, model=PUBLISHED, tokenizer_files=files)
    saver.save(step=1, training={"step": 1}, wait=True)


def test_a_checkpoint_of_experts_across_ranks_becomes_a_hugging_face_folder(tmp_path):
    train_tokenizer(tmp_path / "tokenizer.model")
    run_distributed(write_for_export, 2, tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "hf", verify="tensors")
    reader, (config, tensors) = CheckpointReader(find_checkpoint(tmp_path / "run")), load_hf(tmp_path / "hf")
    assert config.num_experts == PUBLISHED.num_experts
    for name, tensor in tensors.items():
        assert torch.equal(tensor, reader.read(name)), name


def refuse_each(folder: Path, cases: list[tuple[int, str]]) -> None:
    for num_experts, said in cases:
        other = replace(CONFIG, num_experts=num_experts)
        runner = RanksRun(other, Spread(context=2, expert=2))
        with pytest.raises(CheckpointError, match=said):
            load_checkpoint(newest(folder), runner.engine, other)


def test_another_number_of_experts_is_refused_by_both_numbers(written):
    cases = [(n, rf"model\.num_experts: checkpoint 8, run {n}") for n in (4, 16)]
    run_distributed(refuse_each, 2, written((2, 2, 1)), cases)

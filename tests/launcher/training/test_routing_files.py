"""Routing files: what one run wrote, another follows, whatever their degrees; and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from launcher.training.routing_files import RoutingFiles, gather_tokens, minimum_dtype
from longctx.config import ModelConfig
from longctx.errors import ConfigError, DataError
from parallel.layout.sequence import KINDS, SequenceLayout
from tests.helpers import run_distributed
from tests.launcher.workers import end_guarded_each, rows, run, train_each

MODEL = ModelConfig(num_layers=3, num_experts=5, experts_per_token=2, dense_layers=(1,))
ORDER = {"seed": 0, "manifest_hash": "a", "rows_consumed": 0}
TOKENS = 12


def chosen(seed: int = 0) -> Tensor:
    """Ids of two layers, some choices nowhere, [L, T, k]."""
    return torch.randint(-1, 5, (2, TOKENS, 2), generator=torch.Generator().manual_seed(seed))


def record(folder: Path, ids_LTk: Tensor, *, step: int = 1, order: dict[str, Any] = ORDER) -> Path:
    """Write the ids as a run of one rank and three micro-batches does."""
    files = RoutingFiles(str(folder), "no", MODEL, TOKENS)
    files.prepare(range(step, step + 1), resumes=True)
    places = list(torch.arange(TOKENS).split(4))
    files.begin(step, order, places)
    for number, own in enumerate(places):
        replay = files.replay(number)
        assert replay is not None
        for layer in range(2):
            replay.record(layer, ids_LTk[layer, own])
    files.end()
    return folder / f"step_{step:06d}.safetensors"


def follow(folder: Path, *, model: ModelConfig = MODEL, tokens: int = TOKENS, order: dict[str, Any] = ORDER) -> Tensor:
    """What one micro-batch of all tokens, the last first, is told to choose."""
    files = RoutingFiles("no", str(folder), model, tokens)
    files.prepare(range(1, 2), resumes=False)
    files.begin(1, order, [torch.arange(tokens).flip(0)])
    replay = files.replay(0)
    assert replay is not None
    return replay.experts_LNk


def test_what_was_recorded_is_followed_at_its_tokens(tmp_path):
    path = record(tmp_path, chosen())
    assert torch.equal(follow(tmp_path), chosen().flip(1))
    with safe_open(path, framework="pt") as file:
        assert sorted(file.keys()) == [f"model.layers.{n}.mlp.chosen_experts" for n in (0, 2)]
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "nothing half-written is left"
    assert path.stat().st_size < 2 * TOKENS * 2 + 1000, "a byte an id"


@pytest.mark.parametrize(
    ("num_experts", "dtype"),
    [(1, torch.int8), (128, torch.int8), (129, torch.int16), (32768, torch.int16), (32769, torch.int32)],
)
def test_ids_take_the_smallest_integers(num_experts, dtype):
    assert minimum_dtype(num_experts) == dtype
    assert torch.tensor([num_experts - 1, -1]).to(dtype).tolist() == [num_experts - 1, -1]


def scatter_and_gather() -> None:
    for kind, dtype in zip(KINDS, (torch.int8, torch.int16, torch.int32, torch.int16), strict=True):
        check_gather(kind, dtype)


def check_gather(kind: str, dtype: torch.dtype) -> None:
    """Every rank has its share of a sequence in its order; rank 0 gets the sequence."""
    rank, world_size, tokens = dist.get_rank(), dist.get_world_size(), 16 * dist.get_world_size()
    whole_LTk = torch.arange(2 * tokens * 3).view(2, tokens, 3).to(dtype)
    layout = SequenceLayout.build(kind, tokens, world_size, [0, 5, 6, tokens])
    got = gather_tokens(layout.split(whole_LTk, rank, 1), layout.indices(rank), tokens)
    if rank:
        assert got is None
    else:
        assert got is not None
        assert torch.equal(got, whole_LTk)


def test_shares_of_any_layout_come_together():
    run_distributed(scatter_and_gather, 2)


# What is refused.


def rewrite(path: Path, **changed: Any) -> None:
    """The same tensors under other facts."""
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["longctx"])
    save_file(load_file(path), path, metadata={"longctx": json.dumps({**facts, **changed})})


def renamed(path: Path) -> None:
    rewrite(path, step=2)


def another_format(path: Path) -> None:
    save_file(load_file(path), path)


def a_later_release(path: Path) -> None:
    rewrite(path, version=2)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def wrong_ids(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file({name: ids + 1 for name, ids in load_file(path).items()}, path, metadata=metadata)


def gone(path: Path) -> None:
    path.rename(path.with_name("step_000002.safetensors"))


DAMAGED = {
    renamed: ["contains step 2"],
    another_format: ["not a routing file from this release"],
    a_later_release: ["not a routing file from this release"],
    cut_short: ["cannot be read"],
    wrong_ids: ["is damaged", "model.layers.0.mlp.chosen_experts"],
    gone: ["lacks step 1", "step_000002.safetensors to step_000002.safetensors"],
}
OTHERS: list[tuple[dict[str, Any], list[str]]] = [
    ({"model": dataclasses.replace(MODEL, num_experts=8)}, ["another model", "num_experts: file 5, run 8"]),
    ({"model": dataclasses.replace(MODEL, dense_layers=())}, ["expert_layers: file [0, 2], run [0, 1, 2]"]),
    ({"order": {**ORDER, "seed": 1}}, ["other rows", "seed: file 0, run 1"]),
    ({"tokens": 2 * TOKENS}, ["12 tokens", "train.tokens_per_step=24"]),
]
"""Runs that the file is not of."""


def check_refused(folder: Path, said: list[str], **other: Any) -> None:
    with pytest.raises(DataError) as caught:
        follow(folder, **other)
    for words in (*said, str(folder)):
        assert words in str(caught.value)


@pytest.mark.parametrize("damage", DAMAGED, ids=lambda damage: damage.__name__)
def test_a_file_that_is_damaged_is_refused(tmp_path, damage):
    damage(record(tmp_path, chosen()))
    check_refused(tmp_path, DAMAGED[damage])


def test_a_file_of_another_run_is_refused(tmp_path):
    record(tmp_path, chosen())
    for other, said in OTHERS:
        check_refused(tmp_path, said, **other)


def test_a_folder_with_another_runs_files_is_not_recorded_to(tmp_path):
    record(tmp_path, chosen())
    files = RoutingFiles(str(tmp_path), "no", MODEL, TOKENS)
    with pytest.raises(ConfigError, match="already holds a run's routing"):
        files.prepare(range(1, 2), resumes=False)
    files.prepare(range(1, 2), resumes=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        RoutingFiles(str(tmp_path / "file" / "below"), "no", MODEL, TOKENS).prepare(range(1, 2), resumes=False)


# By whole runs.

SHORT = {"train.steps": 2, "train.tokens_per_step": 1024, "validation.rows": 2, "checkpoint.every_steps": 0}
ALONE = {**SHORT, "parallel.context": 1, "train.micro_batch_rows": 2}


OTHER = {**SHORT, "parallel.layout": "balanced", "train.keep": "inputs", "train.store": "host", "model.init_std": 0.2}
"""Other initial weights, which choose otherwise."""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Where this module's runs lie."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def recorded(shards, base) -> tuple[Path, Path]:
    """A run of one rank that records: its folder, and its routing's. Beside it, ``plain`` is the same without."""
    run(train_each, 1, shards, {base / "plain": ALONE, base / "led": {**ALONE, "train.record_routing": base / "ids"}})
    return base / "led", base / "ids"


@pytest.fixture(scope="module")
def followed(shards, base, recorded) -> Path:
    """Runs of two ranks: ``free`` chooses by itself, ``told`` follows; ``alike`` follows and has the same weights, each
    rank with rows of its own and half of the experts."""
    told = {"train.replay_routing": recorded[1]}
    runs = {
        base / "free": OTHER,
        base / "told": {**OTHER, **told, "train.record_routing": base / "ids_of_told"},
        base / "alike": {**SHORT, **told, "parallel.context": 1, "parallel.expert": 2},
    }
    run(train_each, 2, shards, runs)
    return base


def loads(folder: Path) -> list[list[list[int]]]:
    return [row["expert_load"] for row in rows(folder) if row["kind"] == "train"]


def test_recording_changes_nothing(recorded, base):
    assert rows(base / "plain") == rows(recorded[0])
    assert sorted(p.name for p in recorded[1].iterdir()) == [f"step_{n:06d}.safetensors" for n in (1, 2)]


@pytest.mark.slow
def test_two_ranks_choose_what_one_chose(followed, recorded):
    """Files of the follower are the leader's."""
    folder, routing = recorded
    assert loads(followed / "free") != loads(folder)
    assert loads(followed / "told") == loads(folder)
    for path in routing.iterdir():
        mine, theirs = load_file(followed / "ids_of_told" / path.name), load_file(path)
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_two_ranks_that_follow_one_are_a_rounding_apart(followed, recorded):
    """Validation, too, which nobody follows in."""
    for mine, theirs in zip(rows(followed / "alike"), rows(recorded[0]), strict=True):
        assert mine["kind"] == theirs["kind"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        if mine["kind"] == "train":
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
            assert mine["expert_load"] == theirs["expert_load"]


def test_a_run_that_cannot_follow_ends_on_every_rank_with_one_screen(shards, recorded, tmp_path):
    routing = recorded[1]
    cases: list[tuple[dict[str, Any], int, list[str]]] = [
        ({**SHORT, "train.steps": 3, "train.replay_routing": routing}, 1, ["DataError", "lacks step 3", "1 to 3"]),
        ({**SHORT, "train.replay_routing": routing, "run.seed": 1}, 1, ["DataError", "seed: file 0, run 1"]),
        ({**SHORT, "train.record_routing": routing}, 2, ["ConfigError", "already holds a run's routing"]),
    ]
    numbered = [
        ({"run.output_dir": tmp_path / f"run_{n}", **c}, code, words) for n, (c, code, words) in enumerate(cases)
    ]
    run(end_guarded_each, 2, shards, tmp_path / "new", numbered)

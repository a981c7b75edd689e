"""Experts in whole runs: what is logged, what is said aloud, what survives a stop, and experts across ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.metrics.record import read_metrics
from launcher.training.hooks.dead_experts import DeadExperts
from launcher.training.train_step import TrainStep
from launcher.training.trainer import Trainer
from longctx.checkpoint_format import CheckpointReader, list_checkpoints
from tests.helpers import REPOSITORY
from tests.launcher.runs import pretrain
from tests.launcher.workers import (
    build,
    leave_out_pictures,
    rows,
    run,
    train,
    train_each,
)

pytestmark = pytest.mark.timeout(300)

BALANCED = {
    "model.selection_bias": True,
    "model.selection_bias_rate": 1e-2,
    "model.balance_scope": "global_batch",
    "model.router_z_loss_weight": 1e-3,
    "parallel.expert": 2,
    "train.steps": 5,
    "validation.rows": 0,
}
"""Everything that carries something from one step to the next. Steps are odd: two opposite moves of a bias cancel."""
DENSE_FIRST = {"model.num_layers": 3, "model.dense_layers": 0, "model.ffn_size": 32, "parallel.expert": 2}
FULL = {
    "train.steps": 1,
    "train.tokens_per_step": 1024,
    "model.capacity_factor": 1.0,
    "model.router_jitter": 0.1,
    "validation.rows": 0,
}
"""One step, whose weights are the same everywhere; experts have no room for all, and jitter depends on places."""
SPREAD = {
    "data": {**FULL, "parallel.context": 1, "parallel.expert": 2},
    "context": {**FULL, "parallel.context": 2, "parallel.expert": 2, "parallel.layout": "striped"},
}


def all_runs(shards: Path, base: Path) -> None:
    """The runs of two ranks that several tests look at."""
    half = {**BALANCED, "train.stop_after": 2}
    short = {"train.steps": 2, "validation.rows": 0}
    runs = {base / name: changed for name, changed in SPREAD.items()}
    runs |= {base / "dense_first": {**DENSE_FIRST, **short}, base / "whole": BALANCED, base / "halves": half}
    train_each(shards, runs)
    train(shards, base / "halves", {**BALANCED, "run.resume": "latest"})


@pytest.fixture(scope="module")
def base(shards, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run(all_runs, 2, shards, folder)
    return folder


# What is logged.


def test_every_expert_layer_is_logged_under_its_own_number(base):
    for row in rows(base / "dense_first"):
        assert row["expert_layers"] == [1, 2]
        assert [len(counts) for counts in row["expert_load"]] == [4, 4]
        for key in ("expert_max_violation", "expert_mean_violation", "router_entropy", "router_logit_rms"):
            assert len(row[key]) == 2
            assert min(row[key]) > 0
        assert row["expert_dropped_share"] == [0.0, 0.0]
        assert row["router_z_loss"] > 0


def figures(folder: Path) -> dict[str, Any]:
    return {k: v for k, v in rows(folder)[0].items() if k.startswith(("expert", "router", "balance"))}


def test_figures_do_not_depend_on_how_tokens_are_dealt(shards, base, tmp_path):
    run(train, 1, shards, tmp_path / "alone", {**FULL, "parallel.context": 1})
    wanted = figures(tmp_path / "alone")
    assert max(wanted["expert_dropped_share"]) > 0
    for name in SPREAD:
        got = figures(base / name)
        assert got.keys() == wanted.keys()
        assert got["expert_load"] == wanted["expert_load"]
        for key in wanted.keys() - {"expert_load"}:
            assert got[key] == pytest.approx(wanted[key], rel=1e-5), f"{key}, {name}"


# A stop changes nothing.


def bias_of(checkpoint: Path) -> list[float]:
    """The selection biases in a checkpoint, layer by layer."""
    reader = CheckpointReader(checkpoint)
    names = [name for name in reader.names() if name.endswith("e_score_correction_bias")]
    return [float(x) for name in names for x in reader.read(name)]


def bias_of_loads(folder: Path) -> list[float]:
    """What the loads that a run logged make of the selection biases: up by the rate below the mean load, down above."""
    moves = []
    for row in rows(folder):
        load_LE = torch.tensor(row["expert_load"], dtype=torch.float64)
        sign_LE = (load_LE.mean(1, keepdim=True) - load_LE).sign()
        moves.append(BALANCED["model.selection_bias_rate"] * (sign_LE - sign_LE.mean(1, keepdim=True)))
    return torch.stack(moves).sum(0).flatten().tolist()


def test_a_run_that_stops_and_goes_on_equals_one_that_did_not(base):
    assert rows(base / "halves") == rows(base / "whole"), "to the last bit"
    mine, theirs = (list_checkpoints(base / name)[-1] for name in ("halves", "whole"))
    assert CheckpointReader(mine).manifest["files"] == CheckpointReader(theirs).manifest["files"]
    wanted = bias_of_loads(base / "whole")
    assert bias_of(mine) == pytest.approx(wanted, abs=1e-7)
    assert max(map(abs, wanted)) >= 1e-3, "they have moved"


def test_a_checkpoint_holds_the_loads_of_its_step(base):
    for checkpoint in list_checkpoints(base / "whole"):
        manifest = CheckpointReader(checkpoint).manifest
        row = next(row for row in rows(base / "whole") if row["step"] == manifest["step"])
        assert manifest["training"]["expert_load"] == row["expert_load"]


# Dead experts.


def kill_an_expert(shards: Path, output: Path) -> None:
    """No token can choose expert 2 of layer 1: its selection bias is far below all scores."""
    leave_out_pictures()
    changed = {"model.selection_bias": True, "train.steps": 5, "validation.rows": 0, "parallel.context": 1}
    run = build(shards, output, changed)
    run.engine.model.network.model.layers[1].mlp.gate.e_score_correction_bias[2] = -1e3
    step, short = TrainStep(run), DeadExperts(run.model, run.expert_layers, run.model.num_experts, window=3)
    step.hooks = [short if isinstance(hook, DeadExperts) else hook for hook in step.hooks]
    Trainer(run, train_step=step).train()
    started = build(
        shards, output / "next", {**changed, "run.start_from": output, "model.preset": "none", "train.lr": 1e-3}
    )
    assert started.progress.expert_load_LE is None, "a start takes weights and nothing else"


def test_a_dead_expert_is_a_warning_by_name(shards, tmp_path):
    run(kill_an_expert, 1, shards, tmp_path / "run")
    said = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert (
        said.count("WARNING launcher.training.hooks.dead_experts: model.layers.1.mlp.experts.2 is a dead expert") == 1
    )
    assert "in steps 1 to 3" in said


# Experts across ranks, as a user starts them.


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_quickstart_with_experts_across_ranks_learns_the_same(shards, tmp_path):
    recipe = str(REPOSITORY / "launcher" / "recipes" / "quickstart-experts.toml")
    losses = {}
    for degree in (1, 2):
        folder = tmp_path / f"expert_{degree}"
        changed = {
            "parallel.expert": degree,
            "data.train": shards,
            "run.output_dir": folder,
            # Rounding alone changes the first tokens' experts soon after, here as between two layouts.
            "train.steps": 40,
            "train.dtype": "float32",
            "validation.every_steps": 20,
            "validation.rows": 4,
        }
        ended = pretrain(
            ["--config", recipe, *(word for key, value in changed.items() for word in (f"--{key}", str(value)))],
            timeout=580,
        )
        assert ended.code == 0, ended.text
        losses[degree] = [r["loss"] for r in read_metrics(folder) if r["kind"] == "validation"]
    first = next(r["loss"] for r in read_metrics(folder) if r["kind"] == "train")
    assert losses[1][-1] < first - 0.5, "it learns"
    assert losses[2] == pytest.approx(losses[1], abs=1e-4)

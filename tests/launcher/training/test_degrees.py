"""Runs with ``parallel.tokens_per_rank``: as a fixed degree and as one process, stopped, killed, chunked, replayed."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from launcher.metrics.record import Record
from launcher.run_folder import CONFIG_FILE
from longctx.checkpoint_format import CHECKPOINTS, CheckpointReader
from tests.helpers import run_distributed
from tests.launcher.workers import rows, run, train_each, train_until_killed_in_a_step

pytestmark = pytest.mark.timeout(300)

ROWS = 7
"""Of a step: no number of rows at once divides it."""
SAME: dict[str, Any] = {
    "train.steps": 3,
    "train.tokens_per_step": 256 * ROWS,
    "train.lr": 1e-3,
    "parallel.layout": "auto",
    "validation.rows": 5,
    "validation.every_steps": 2,
}
ONE = {**SAME, "parallel.context": 1}
DEGREE_KEYS = {"ranks_per_document", "most_ranks_per_document", "attention_imbalance"}


def shared(tokens_per_rank: int, **changed: Any) -> dict[str, Any]:
    """All ranks share what they can hold."""
    named = {name.replace("__", "."): value for name, value in changed.items()}
    return {**SAME, "parallel.context": 1, "parallel.tokens_per_rank": tokens_per_rank, **named}


def without_degrees(records: list[Record]) -> list[Record]:
    return [{key: value for key, value in record.items() if key not in DEGREE_KEYS} for record in records]


def check_equal(got: Path, wanted: Path) -> None:
    """Losses and norms of every step, and the validation's, are those of another way to spread the run."""
    pairs = list(zip(rows(got), rows(wanted), strict=True))
    assert pairs
    for mine, other in pairs:
        assert (mine["kind"], mine["step"]) == (other["kind"], other["step"])
        # float32: the order of sums, over a few steps.
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        if mine["kind"] == "train":
            assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
            assert mine["tokens"] == other["tokens"], "padding is counted nowhere"
        else:
            assert mine["num_targets"] == other["num_targets"]


@pytest.fixture(scope="module")
def alone(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The steps in one process, a row at a time."""
    folder = tmp_path_factory.mktemp("degrees") / "alone"
    run(train_each, 1, shards, {folder: ONE})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "ways"),
    [
        (2, {"shared": shared(500), "fixed": {**SAME, "parallel.context": 2}}),
        (3, {"shared": shared(300)}),
        (3, {"long": shared(86, zero__stage=2)}),
        (4, {"heads": shared(300, parallel__ulysses=2, zero__stage=3)}),
    ],
)
def test_losses_and_norms_are_those_of_one_process(ranks, ways, shards, alone, tmp_path):
    run(train_each, ranks, shards, {tmp_path / name: changed for name, changed in ways.items()})
    for name in ways:
        check_equal(tmp_path / name, alone)


@pytest.mark.slow
def test_context_groups_side_by_side_share_experts(shards, tmp_path):
    """Two groups of two ranks, experts over all four, rows that differ by one from micro-batch to micro-batch."""
    step = {"train.tokens_per_step": 256 * 10, "zero.stage": 2}
    groups = shared(400, **step) | {"parallel.context": 2, "parallel.expert": 4}
    run(train_each, 4, shards, {tmp_path / "groups": groups})
    run(train_each, 1, shards, {tmp_path / "alone": ONE | step | {"zero.stage": 1}})
    check_equal(tmp_path / "groups", tmp_path / "alone")
    config = tomllib.loads((tmp_path / "groups" / CONFIG_FILE).read_text())
    assert (config["parallel"]["context"], config["train"]["micro_batch_rows"]) == (2, 3)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [5, 7])
def test_five_and_seven_ranks(ranks, shards, alone, tmp_path):
    ways = {"zero": shared(600 // ranks, zero__stage=3), "chunks": shared(600 // ranks, train__chunk_tokens=31)}
    run_distributed(train_each, ranks, shards, {tmp_path / n: way for n, way in ways.items()}, timeout=800)
    for name in ways:
        check_equal(tmp_path / name, alone)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits_and_on_other_ranks_to_the_same_losses(shards, tmp_path):
    unbroken, killed, other = (tmp_path / name for name in ("unbroken", "killed", "other"))
    changed = shared(300, checkpoint__every_steps=2, train__steps=4)
    run(train_each, 3, shards, {unbroken: changed})
    with pytest.raises(AssertionError, match="rank 0 of 3"):
        run(train_until_killed_in_a_step, 3, shards, killed, changed, 1, 4)
    assert [row["step"] for row in rows(killed) if row["kind"] == "train"] == [1, 2, 3]
    run(train_each, 3, shards, {killed: {**changed, "run.resume": "latest"}})
    assert rows(killed) == rows(unbroken)
    for folder in sorted((unbroken / CHECKPOINTS).iterdir()):
        files = [CheckpointReader(path).manifest["files"] for path in (folder, killed / CHECKPOINTS / folder.name)]
        assert files[0] == files[1], f"{folder.name} holds other bytes"
    middle = killed / CHECKPOINTS / "step_000002"
    run(train_each, 2, shards, {other: {**changed, "parallel.tokens_per_rank": 1000, "run.resume": middle}})
    later = [record for record in without_degrees(rows(unbroken)) if record["step"] > 2]
    for mine, wanted in zip(rows(other), later, strict=True):
        assert mine["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [pytest.param(False, marks=pytest.mark.slow), True])
def test_dropout_and_capacity_of_whole_layers_and_by_chunks(chunks, shards, tmp_path):
    """What depends on a token's index in the step, and on how many of them a rank has."""
    model = {"model.residual_dropout": 0.1, "model.router_jitter": 0.1, "model.capacity_factor": 1.0}
    together: dict[str, Any] = shared(300) | model
    if chunks:
        together |= {"train.chunk_tokens": 50, "train.keep": "attention", "train.store": "host"}
    run(train_each, 3, shards, {tmp_path / "shared": together})
    run(train_each, 1, shards, {tmp_path / "alone": ONE | model})
    check_equal(tmp_path / "shared", tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "ways"),
    [
        (2, {"fixed": {**SAME, "parallel.context": 2}, "shared": shared(600)}),
        pytest.param(3, {"three": shared(400)}, marks=pytest.mark.slow),
    ],
    ids=["2", "3"],
)
def test_routing_is_recorded_and_followed_without_the_padding(ranks, ways, shards, tmp_path):
    recorded, files = tmp_path / "recorded", tmp_path / "routing"
    run(train_each, 3, shards, {recorded: shared(300, train__record_routing=files)})
    assert len(list(files.iterdir())) == 3
    runs = {tmp_path / name: way | {"train.replay_routing": files} for name, way in ways.items()}
    run(train_each, ranks, shards, runs)
    for folder in runs:
        check_equal(folder, recorded)
        loads = [[json.dumps(r.get("experts")) for r in rows(f) if r["kind"] == "train"] for f in (folder, recorded)]
        assert loads[0] == loads[1]

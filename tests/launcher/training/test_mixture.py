"""A run over a mixture: validated on what its sources hold out, changed in mid-run, resumed on other ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launcher.training.hooks.skip_bad_steps import rows_from
from tests.helpers import run_distributed
from tests.launcher.runs import tiny_config
from tests.launcher.workers import rows, train, train_each

STAGE = "[[stages]]\nfrom_tokens = 1500\nrow_tokens = {row_tokens}\nweights = {{ second = 3 }}\n"


@pytest.fixture
def mixture(shards: Path, tmp_path: Path) -> Path:
    """The tiny corpus twice, under two names."""
    for name in ("first", "second"):
        shutil.copytree(shards, tmp_path / name)
    sources = "".join(f'[[sources]]\nname = "{name}"\npath = "{name}"\nweight = 1\n' for name in ("first", "second"))
    (tmp_path / "mixture.toml").write_text(
        sources + STAGE.format(row_tokens=tiny_config(shards, tmp_path).data.seq_len // 4)
    )
    return tmp_path / "mixture.toml"


def train_on_one_rank(mixture: Path, output: Path, changed: dict) -> None:
    train(mixture, output, changed)


def check_by_source(record: dict) -> None:
    """The sources' losses are parts of the one loss."""
    parts = record["loss_by_source"].values()
    assert sum(part["num_targets"] for part in parts) == record["num_targets"]
    total = sum(part["loss"] * part["num_targets"] for part in parts)
    assert total / record["num_targets"] == pytest.approx(record["loss"], rel=1e-9)


def test_a_run_stopped_in_the_middle_goes_on_to_the_same_rows_on_other_ranks(mixture: Path, tmp_path: Path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_distributed(train_each, 2, mixture, {whole: {}, stopped: {"train.stop_after": 4}}, timeout=100)
    run_distributed(
        train_on_one_rank, 1, mixture, stopped, {"run.resume": "latest", "parallel.context": 1}, timeout=100
    )
    ours, theirs = ([row for row in rows(folder) if row["kind"] != "event"] for folder in (stopped, whole))
    assert [(row["kind"], row["step"]) for row in ours] == [(row["kind"], row["step"]) for row in theirs]
    assert any(row["kind"] == "validation" for row in theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.get("source_tokens") == other.get("source_tokens")
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    for one, other in zip(ours, theirs, strict=True):
        if one["kind"] == "validation":
            check_by_source(one)
            assert one["loss_by_source"].keys() == other["loss_by_source"].keys() == {"first", "second"}
    # From 1,500 tokens on, three of four.
    first, second = (theirs[-2]["source_tokens"][name] for name in ("first", "second"))
    assert first + second == theirs[-2]["tokens"]
    assert second > 1.5 * first
    log = (whole / "logs/rank_0.log").read_text()
    assert "tokens in all: first " in log


def test_a_broken_step_names_the_rows_of_each_source(mixture: Path, tmp_path: Path):
    source = {"block_row": 7, "block": 1, "epoch": 2}
    said = rows_from(tiny_config(mixture, tmp_path / "run"), {"rows_consumed": 12, "sources": {"first": source}})
    assert "from the run's row 12 on (first from epoch 2, block 1, row 7 on; longctx data sample" in said
    assert "--first-row 12" in said


def test_a_mixture_that_is_used_up_says_so_before_and_when(mixture: Path, tmp_path: Path):
    few = "epochs = 1\nupsample = [{ min_tokens = 0, factor = 0.03 }]"
    text = mixture.read_text().replace("weight = 1", few)
    mixture.write_text(text[: text.index("[[stages]]")])
    changed = {"train.steps": 500, "checkpoint.every_steps": 500, "parallel.context": 1}
    with pytest.raises(AssertionError, match="is exhausted after"):
        run_distributed(train_on_one_rank, 1, mixture, tmp_path / "out", changed)
    assert "The mixture ends about" in (tmp_path / "out/logs/rank_0.log").read_text()

"""``train.compile``: what it comes to, what the log says, and a run whose blocks are compiled."""

from __future__ import annotations

import json
import logging

import pytest
import torch

import launcher.training.compiling as compiling
from launcher.training.compiling import compiler_of, settle_compile
from longctx.errors import ConfigError
from longctx.kernels.regions import missing_for_compiling
from tests.helpers import run_distributed
from tests.launcher.runs import SCREEN, tiny_config
from tests.launcher.workers import train

CUDA = torch.device("cuda")
CPU = torch.device("cpu")


def asked(tmp_path, wish: str):
    return tiny_config(tmp_path / "shards", tmp_path / "run", {"train.compile": wish})


def with_missing(monkeypatch, problems: list[str | None]) -> None:
    """Let the ranks be so many machines that lack these things."""
    monkeypatch.setattr(compiling, "gather_objects", lambda _: problems)


def test_auto_is_on_for_gpus_that_can_compile_and_off_for_cpus(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with_missing(monkeypatch, [None, None])
    assert compiler_of(settle_compile(asked(tmp_path, "auto"), CUDA)) == "inductor"
    assert "first step takes longer" in caplog.text
    for wish, device, found in (("auto", CPU, None), ("off", CUDA, None), ("on", CPU, "inductor")):
        settled = settle_compile(asked(tmp_path, wish), device)
        assert compiler_of(settled) == found
        assert settled.train.compile in ("on", "off")


def test_without_a_compiler_auto_goes_on_and_says_so(monkeypatch, tmp_path, caplog):
    with_missing(monkeypatch, [None, "Triton is missing (pip install triton)"])
    assert compiler_of(settle_compile(asked(tmp_path, "auto"), CUDA)) is None
    assert "on rank 1 Triton is missing" in caplog.text


def test_without_a_compiler_on_is_refused_on_one_screen(monkeypatch, tmp_path):
    with_missing(monkeypatch, [None, "there is no C++ compiler (g++)"])
    with pytest.raises(ConfigError, match=r"train.compile=on, but on rank 1 .*g\+\+.*\n.*train.compile=off") as error:
        settle_compile(asked(tmp_path, "on"), CPU)
    assert len(str(error.value).splitlines()) < SCREEN


def test_an_unknown_wish_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        asked(tmp_path, "maybe")
    assert "('auto', 'on', 'off')" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(missing_for_compiling("cpu") is not None, reason=f"cannot compile: {missing_for_compiling('cpu')}")
@pytest.mark.timeout(600)
def test_a_compiled_run_has_eagers_losses_and_says_what_compiling_took(shards, tmp_path):
    changed = {"run.timeout_seconds": 400.0}
    for wish in ("off", "on"):
        run_distributed(train, 2, shards, tmp_path / wish, {**changed, "train.compile": wish}, timeout=500)
    losses = {}
    for wish in ("off", "on"):
        records = [json.loads(line) for line in (tmp_path / wish / "metrics.jsonl").read_text().splitlines()]
        losses[wish] = [record["loss"] for record in records if record["kind"] == "train"]
    assert losses["on"] == pytest.approx(losses["off"], rel=1e-6)
    log = (tmp_path / "on" / "logs" / "rank_0.log").read_text()
    assert log.count("Compiling 2 graphs took") == log.count("Compiling ") == 1
    assert "of step 1." in log
    assert "Compiling" not in (tmp_path / "off" / "logs" / "rank_0.log").read_text()

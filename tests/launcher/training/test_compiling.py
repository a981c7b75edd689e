"""``train.compile``: what it comes to, what the log says, and a run whose blocks are compiled."""

from __future__ import annotations

import json

import pytest
import torch

import launcher.training.rank_machine as machines
from launcher.config.resolve import Choice, Data, TargetMachine, resolve
from launcher.training.task_builder import compiler_of
from longctx.errors import ConfigError
from longctx.kernels.regions import missing_for_compiling
from parallel.mesh import Mesh
from tests.helpers import run_distributed
from tests.launcher.runs import SCREEN, tiny_config
from tests.launcher.workers import train


def asked(tmp_path, wish: str):
    return tiny_config(tmp_path / "shards", tmp_path / "run", {"train.compile": wish})


def comes_to(tmp_path, wish: str, device_type: str, problem: str = "") -> tuple[str | None, list[Choice]]:
    """The compiler of a run that wishes so, and what is said."""
    said: list[Choice] = []
    machine = TargetMachine(ranks=2, device_type=device_type, native_bfloat16=True, compile_problem=problem)
    config = resolve(asked(tmp_path, wish), machine, Data(is_packed=True), say=said.append)
    return compiler_of(config), [choice for choice in said if "ompile" in choice.why]


def test_auto_is_on_for_gpus_that_can_compile_and_off_for_cpus(tmp_path):
    compiler, (said,) = comes_to(tmp_path, "auto", "cuda")
    assert compiler == "inductor"
    assert "first step takes longer" in said.why
    for wish, device_type, found in (("auto", "cpu", None), ("off", "cuda", None), ("on", "cpu", "inductor")):
        assert comes_to(tmp_path, wish, device_type)[0] == found


def test_without_a_compiler_auto_goes_on_and_says_so(tmp_path):
    compiler, (said,) = comes_to(tmp_path, "auto", "cuda", "on rank 1 Triton is missing (pip install triton)")
    assert compiler is None
    assert said.is_warning
    assert "on rank 1 Triton is missing" in said.why


def test_without_a_compiler_on_is_refused_on_one_screen(tmp_path):
    with pytest.raises(ConfigError, match=r"train.compile=on, but on rank 1 .*g\+\+.*\n.*train.compile=off") as error:
        comes_to(tmp_path, "on", "cpu", "on rank 1 a C++ compiler is missing (g++)")
    assert len(str(error.value).splitlines()) < SCREEN


def test_the_rank_that_cannot_compile_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(machines, "gather_objects", lambda _: [None, "a C++ compiler is missing (g++)"])
    mesh = Mesh(rank=0, world_size=2, context=2, ranks_per_node=2)
    for wish, problem in (("on", "on rank 1 a C++ compiler is missing (g++)"), ("auto", ""), ("off", "")):
        machine = machines.machine_of_ranks(TargetMachine(ranks=2), asked(tmp_path, wish), mesh, torch.device("cpu"))
        assert machine.compile_problem == problem


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

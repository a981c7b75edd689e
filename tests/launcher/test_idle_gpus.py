"""Scripts refuse more ranks than GPUs before anything is allocated, and the lines that they show are ones to type."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec

import pytest
import torch

from launcher import lm_eval, pretrain, verify
from launcher.cli.cli_commands import main_over_ranks
from launcher.config.load_config import load_run_config
from launcher.config.run_config_rules import check_run
from launcher.measure.run_benchmarks import BenchmarkOptions, _num_ranks
from longctx.errors import ConfigError
from parallel.runtime.device import choose_device
from tests.launcher.runs import resolved


@pytest.fixture
def two_ranks(monkeypatch):
    """A process that deepspeed started as the second of two on a machine with one GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in (("RANK", 1), ("LOCAL_RANK", 1), ("WORLD_SIZE", 2), ("LOCAL_SIZE", 2)):
        monkeypatch.setenv(name, str(value))


def lines_of(refusal: pytest.ExceptionInfo[ConfigError], script: str) -> list[tuple[int, list[str]]]:
    """Ranks and flags of the commands that a refusal shows."""
    commands = [shlex.split(line) for line in str(refusal.value).splitlines() if line.startswith("    ")]
    assert [command[:2] + command[3:4] for command in commands] == [["deepspeed", "--num_gpus", script]] * 2
    return [(int(command[2]), command[4:]) for command in commands]


@pytest.mark.few(2)
@pytest.mark.parametrize("script", [pretrain, verify])
@pytest.mark.parametrize(
    "flags", [[], ["--config", "quickstart-experts", "--run.device", "auto"], ["--parallel.ulysses=2"]]
)
def test_a_run_is_refused_and_both_lines_are_runs(two_ranks, monkeypatch, script, flags):
    name = f"launcher/{script.__name__.rpartition('.')[2]}.py"
    monkeypatch.setattr(sys, "argv", [name, "--local_rank=1", *flags])
    with pytest.raises(ConfigError, match="2 ranks and has 1 GPU") as refusal:
        script.main(sys.argv[1:])
    (one, on_gpu), (two, on_cpu) = lines_of(refusal, name)
    assert (one, two) == (1, 2)
    for ranks, arguments in ((one, on_gpu), (two, on_cpu)):
        config = load_run_config(arguments)
        check_run(resolved(config, native_bfloat16=True), ranks)
    # The first would take the GPU, which this machine lacks.
    assert load_run_config(on_gpu).run.device == "auto"
    assert choose_device(load_run_config(on_cpu).run.device) == torch.device("cpu")


@pytest.mark.parametrize(
    ("verb", "flags"),
    [
        ("evaluate", ["--tasks", "niah", "--lengths", "64", "--output", "out"]),
        ("generate", ["--prompt", "def", "--max-new-tokens", "2"]),
    ],
)
def test_verbs_over_ranks_are_refused(two_ranks, monkeypatch, tmp_path, verb, flags):
    monkeypatch.setattr(sys, "argv", [f"launcher/{verb}.py", "--checkpoint", str(tmp_path), *flags])
    with pytest.raises(ConfigError, match="--device='auto': this machine runs 2 ranks and has 1 GPU") as refusal:
        main_over_ranks(verb, sys.argv[1:])
    (_, on_gpu), (_, on_cpu) = lines_of(refusal, sys.argv[0])
    assert on_gpu == sys.argv[1:]
    assert on_cpu == [*sys.argv[1:], "--device", "cpu"]


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_lm_eval_is_refused(two_ranks, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launcher/lm_eval.py", "--tasks", "arc_easy"])
    with pytest.raises(ConfigError, match=r"2 launcher/lm_eval.py --tasks arc_easy --device cpu$"):
        lm_eval.main(sys.argv[1:])


def test_measure_is_refused_before_it_starts_ranks(two_ranks):
    with pytest.raises(ConfigError, match="Use --ranks 1, or --device cpu"):
        _num_ranks(BenchmarkOptions(ranks=2))
    assert _num_ranks(BenchmarkOptions(ranks=0)) == 1
    assert _num_ranks(BenchmarkOptions(ranks=2, device="cpu")) == 2

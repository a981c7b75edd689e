"""The stages of the first hour on GPUs: what each asks, how it is asked, and where its figures are read.

On a machine without a GPU a stage is the same command at a tiny size on the CPU, or is skipped and says why.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.trace.stand_in import torch_cuda_version

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
PYTEST = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "1700"]
LONGCTX = [PYTHON, "-m", "launcher"]
NO_GPU = "no GPU: skipped"
_DRILLS = "tests/launcher/test_accidents.py"
_NO_TESTS = 5
"""pytest's exit code where nothing was selected."""
_SMALL_GPUS = 40 * 8
"""GiB of all GPUs together below which an 8B model's optimiser does not fit, and fewer layers are profiled."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One question to the machine."""

    name: str
    question: str
    commands: list[list[str]]
    minutes: float
    figures: Callable[[], dict[str, Any]] = dict
    """Read once the commands have ended."""
    skipped: str = ""
    """Why it is not asked here; empty where it is."""
    fine: tuple[int, ...] = (0,)
    """Exit codes of a stage that passed."""


@dataclass(frozen=True)
class Place:
    """Where the stages run."""

    folder: Path
    gpus: int
    """0 for a dry run on the CPU."""

    @property
    def ranks(self) -> int:
        """Processes of a training stage: one a GPU, two on a CPU."""
        return self.gpus or 2


def stages(place: Place) -> list[Stage]:
    """All stages, cheap ones and those that others build on first."""
    return [
        _tests(place),
        _benchmark(place, "gpu_attention", "How fast are attention's kernels, and a ring of their blocks?"),
        _benchmark(place, "gpu_moe", "How fast are expert layers beside dense products?"),
        _data(place),
        _balanced(place),
        _profile(place),
        _plan(place),
        _drills(place),
    ]


def _tests(place: Place) -> Stage:
    words = [*PYTEST, "-m", "gpu or multigpu", "tests"]
    if not place.gpus:
        words = [*PYTEST, "-m", "gpu or multigpu", "--collect-only", "tests/longctx/kernels/attention"]
    return Stage(
        name="tests",
        question="Do the tests pass that need a GPU?",
        commands=[words],
        minutes=15,
        figures=lambda: _pytest_figures(place.folder / "tests.log"),
        fine=(0, _NO_TESTS),
    )


def _benchmark(place: Place, name: str, question: str) -> Stage:
    output = place.folder / f"{name}.json"
    words = [PYTHON, "-m", f"benchmarks.{name}", "--output", str(output)]
    if not place.gpus:
        words += ["--device", "cpu", "--tiny"]

    def figures() -> dict[str, Any]:
        told = json.loads(output.read_text())
        return {"device": told["device"], "seconds": told["seconds"], "tables": output.name}

    return Stage(name=name, question=question, commands=[words], minutes=10, figures=figures)


def _drills(place: Place) -> Stage:
    why = ""
    if not place.gpus:
        why = NO_GPU + " (on a CPU `make faults` runs the drills)"
    elif not (ROOT / _DRILLS).exists():
        why = f"{_DRILLS} is not there"
    return Stage(
        name="drills",
        question="Does a failing rank end all ranks, with its message?",
        commands=[[*PYTEST, "-m", "not multigpu", _DRILLS]],
        minutes=20,
        figures=lambda: _pytest_figures(place.folder / "drills.log"),
        skipped=why,
    )


def _data(place: Place) -> Stage:
    source, vocab_size = "stdlib", 4096
    if not place.gpus:
        source, vocab_size = str(ROOT / "docs"), 600
    tokenizer, data = str(place.folder / "tokenizer.model"), str(place.folder / "data")
    again = ["--overwrite"]
    train = ["tokenizer", "train", "--source", source, "--vocab-size", f"{vocab_size}", "--output", tokenizer]
    build = ["data", "build", "--source", source, "--tokenizer", tokenizer, "--output", data]
    return Stage(
        name="data",
        question="Is there text to train on?",
        commands=[[*LONGCTX, *train, *again], [*LONGCTX, *build, *again]],
        minutes=10,
    )


def _balanced(place: Place) -> Stage:
    run = place.folder / "balanced"
    sizes = {"--config": "dense-1b", "--data.seq_len": 16_384 * place.ranks, "--train.steps": 20}
    if not place.gpus:
        sizes = {"--config": "quickstart", "--data.seq_len": 256, "--train.steps": 3}
    settings = {**sizes, "--train.keep": "attention", "--parallel.layout": "balanced"}
    return Stage(
        name="balanced",
        question=f"Do {sizes['--train.steps']} steps of balanced rows run at context degree {place.ranks}?",
        commands=[_forget(run), training(place, "launcher/pretrain.py", run, settings), _forget(run / "checkpoints")],
        minutes=15,
        figures=lambda: run_figures(run),
    )


def _profile(place: Place) -> Stage:
    run, trace = place.folder / "profile", place.folder / "profile.json"
    settings = {**profile_settings(place), "--train.steps": 20}
    profiled = training(place, "benchmarks/profiled.py", run, settings)
    profiled += ["--profile", str(trace), "--profiled-step", "4"]

    def figures() -> dict[str, Any]:
        return {**run_figures(run), "trace": trace.name, "MiB": trace.stat().st_size >> 20}

    return Stage(
        name="profile",
        question="Where does a step of an 8B model at 32K tokens spend its time?",
        commands=[_forget(run), profiled],
        minutes=20,
        figures=figures,
    )


def profile_settings(place: Place) -> dict[str, Any]:
    """The 8B model at 32K tokens, of fewer layers where GPUs are few; on a CPU a tiny model."""
    if not place.gpus:
        return {"--config": "quickstart", "--data.seq_len": 256}
    import torch

    layers = 32
    if sum(torch.cuda.get_device_properties(n).total_memory for n in range(place.gpus)) < _SMALL_GPUS << 30:
        layers = 4 * place.gpus
    return {
        "--config": "quickstart",
        "--model.preset": "llama-3.1-8b",
        "--model.num_layers": min(32, layers),
        "--data.seq_len": 32_768,
        "--zero.stage": 3,
        "--train.keep": "attention",
    }


def _plan(place: Place) -> Stage:
    told = place.folder / "plan.json"
    settings = {**_common(place), **profile_settings(place)}
    settings["--train.tokens_per_step"] = settings["--data.seq_len"]
    words = [*LONGCTX, "plan", "--trace", "--json", "--ranks", f"{place.ranks}"]
    for name, value in settings.items():
        words += [name, f"{value}"]
    # A shell would do; this needs none.
    save = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[2:], stdout=open(sys.argv[1], 'w')).returncode)"
    why = ""
    if torch_cuda_version() is None:
        why = "this PyTorch is a CPU build: `longctx plan --trace` says what to install"

    def figures() -> dict[str, Any]:
        planned = max(rank["bytes"]["peak"] for rank in json.loads(told.read_text())["ranks"])
        measured = run_figures(place.folder / "profile").get("peak bytes")
        found: dict[str, Any] = {"planned peak bytes": planned, "measured peak bytes": measured or "not measured"}
        if measured and place.gpus:
            found["planned / measured"] = round(planned / measured, 3)
        return found

    return Stage(
        name="plan",
        question="Is the traced peak of that step the measured one?",
        commands=[[PYTHON, "-c", save, str(told), *words]],
        minutes=10,
        figures=figures,
        skipped=why,
    )


def training(place: Place, script: str, run: Path, settings: dict[str, Any]) -> list[str]:
    """The command that trains on all ranks of this machine."""
    words = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", f"{place.ranks}", script]
    words += ["--data.train", str(place.folder / "data"), "--run.output_dir", str(run)]
    for name, value in {**_common(place), **settings}.items():
        words += [name, f"{value}"]
    # One row a step; the schedule ends where the run does.
    return [*words, "--train.tokens_per_step", f"{settings['--data.seq_len']}", "--train.warmup_steps", "1"]


def _common(place: Place) -> dict[str, Any]:
    device = "cuda"
    if not place.gpus:
        device = "cpu"
    return {
        "--parallel.context": place.ranks,
        "--run.device": device,
        "--run.hostfile": "none",
        "--validation.rows": 0,
        "--checkpoint.every_steps": 0,
    }


def _forget(folder: Path) -> list[str]:
    """The command that removes what an earlier attempt has left, or checkpoints that nobody will read."""
    return [PYTHON, "-c", "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)", str(folder)]


def run_figures(run: Path) -> dict[str, Any]:
    """What a run's metrics say: steps, losses, and of the last step its rate and memory."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [record for record in records if record.get("kind") == "train"]
    if not steps:
        return {}
    last = steps[-1]
    return {
        "steps": last["step"],
        "loss": f"{steps[0]['loss']:.3f} → {last['loss']:.3f}",
        "tokens a second": round(last["tokens_per_second"]),
        "mfu": last.get("mfu"),
        "peak bytes": max(step["max_memory_bytes"] for step in steps),
    }


def _pytest_figures(log: Path) -> dict[str, Any]:
    """The last line of pytest's summary."""
    lines = [line.strip(" =") for line in log.read_text(errors="replace").splitlines()]
    found = [line for line in lines if re.search(r" in [\d.]+s", line)]
    return {"pytest": "; ".join(found[-1:]) or "no summary"}

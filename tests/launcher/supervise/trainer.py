"""A stand-in for ``launcher/pretrain.py`` that ends as a plan says: what a supervisor sees of training, in no time."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.supervise.training_command import TrainingCommand

_SCRIPT = """
import json, os, pathlib, signal, subprocess, sys, time

place = pathlib.Path(__file__).parent
arguments = sys.argv[1:]
calls = place / "calls.jsonl"
number = len(calls.read_text().splitlines()) if calls.exists() else 0
with calls.open("a") as file:
    file.write(json.dumps(arguments) + "\\n")
plan = json.loads((place / "plan.json").read_text())[number]
folder = pathlib.Path(arguments[arguments.index("--run.output_dir") + 1])
folder.mkdir(parents=True, exist_ok=True)
for step in plan["steps"]:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "step": step, "loss": 1.0}) + "\\n")
for step in plan["saves"]:
    save = folder / "checkpoints" / f"step_{step:06d}"
    save.mkdir(parents=True)
    (save / "manifest.json").write_text("{}")
if plan["stop"]:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "event", "event": "stop", "step": step, "reason": plan["stop"]}) + "\\n")
if plan["wrong"]:
    rank, world_size = plan["wrong"]
    findings = [{"ranks": [rank], "hosts": ["node"]}]
    event = {"kind": "event", "event": "audit", "step": step + 1, "world_size": world_size, "findings": findings}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\\n")
if plan["rank"]:
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (place / "rank").write_text(str(rank.pid))
if plan["hangs"]:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(plan["code"]))
    (place / "hangs").touch()
    time.sleep(600)
if plan["code"] < 0:
    os.kill(os.getpid(), -plan["code"])
sys.exit(plan["code"])
"""


@dataclass(frozen=True, kw_only=True)
class Act:
    """What one start of it does."""

    steps: Sequence[int] = ()
    """Those that it records."""
    saves: Sequence[int] = ()
    """Those that it leaves a checkpoint of."""
    code: int = 1
    """Its exit code; a negative one is a signal that kills it."""
    stop: str = ""
    """The reason of a stop that it records."""
    wrong: Sequence[int] = ()
    """The rank that an audit finds to have computed a wrong number, and how many ranks there are; empty: none."""
    rank: bool = False
    """Whether it leaves a process behind."""
    hangs: bool = False
    """Whether it computes until SIGTERM."""


class Trainer:
    """The stand-in, in a folder of its own."""

    def __init__(self, folder: Path, *acts: Act) -> None:
        self.place, self.run = folder / "launcher", folder / "run"
        self.place.mkdir()
        (self.place / "pretrain.py").write_text(_SCRIPT)
        (self.place / "plan.json").write_text(json.dumps([asdict(act) for act in acts], default=list))

    def words(self, *more: object) -> list[str]:
        """The line that starts it."""
        settings = ["--train.steps", "10", "--run.output_dir", self.run, "--train.warmup_steps", "1", *more]
        return [sys.executable, str(self.place / "pretrain.py"), *map(str, settings)]

    def calls(self) -> list[list[str]]:
        """The arguments of each start."""
        return [json.loads(line) for line in (self.place / "calls.jsonl").read_text().splitlines()]

    def resumes(self) -> list[str | None]:
        """The ``--run.resume`` of each start."""
        return [TrainingCommand((), tuple(call)).resume for call in self.calls()]

    def restarts(self) -> list[dict]:
        """What the run's folder says of attempts that failed."""
        return [json.loads(line) for line in (self.run / "restarts.jsonl").read_text().splitlines()]

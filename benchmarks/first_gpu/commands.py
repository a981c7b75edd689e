"""Commands of the product, as a user types them: run with a limit, in the step's log, their figures read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.first_gpu.checks import ROOT, Job, one_line

LAUNCHER = [sys.executable, "-m", "launcher"]


class Command:
    """A process whose output is kept, and printed when it has ended."""

    def __init__(self, words: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None) -> None:
        """Start it. After ``seconds`` it is killed, and whatever it has started."""
        self.words, self.timed_out = list(map(str, words)), False
        self._text: str | None = None
        # A file, not a pipe: several commands run before the first one's output is read.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            self.words, cwd=ROOT, env=dict(os.environ) | dict(environment or {}),
            stdout=self._said, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self._timer = threading.Timer(seconds, self._end)
        self._timer.start()

    def _end(self) -> None:
        self.timed_out = True
        try:
            family = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        for process in family:
            process.kill()
        self._process.kill()

    def output(self) -> str:
        """Return all that it said, once it has ended."""
        if self._text is None:
            self._process.wait()
            self._timer.cancel()
            self._said.seek(0)
            self._text = self._said.read().decode(errors="replace")
            self._said.close()
            print(f"$ {' '.join(self.words)}\n{self._text}", flush=True)
        return self._text

    @property
    def code(self) -> int:
        """Its exit code, once it has ended."""
        return self._process.returncode

    def problem(self) -> str:
        """Return how it failed, in one line; empty if it did not."""
        last = last_words(self.output())
        if self.timed_out:
            return f"it did not end in time; last: {last}"
        return f"exit code {self.code}: {last}" if self.code else ""


def run(words: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None) -> str:
    """Return what a command says; RuntimeError if it fails or takes longer."""
    command = Command(words, seconds=seconds, environment=environment)
    if problem := command.problem():
        raise RuntimeError(problem)
    return command.output()


def last_words(text: str) -> str:
    """Return the last line that says what went wrong, else the last one."""
    lines = [line for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "differ" in line]
    return one_line((telling or lines or ["nothing"])[-1], 180)


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as flags."""
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def common(job: Job) -> dict[str, Any]:
    """Return the settings of every run: this machine alone, one rank, nothing compiled, no rank waits for long."""
    return {
        "config": "quickstart",
        "run.device": job.device,
        "run.hostfile": "none",
        "run.timeout_seconds": job.pick(60, 300),
        "parallel.context": 1,
        "train.compile": "off",
    }


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run's metrics.jsonl; none if it wrote none."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the steps that a run took."""
    return [record for record in records(folder) if record.get("kind") == "train"]

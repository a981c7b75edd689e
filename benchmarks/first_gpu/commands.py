"""longctx commands as users type them: run with a limit, logged in the step's log, their results read."""

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
        """Start it; kill it and all its descendants after ``seconds``."""
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
        """Return all its output, after it has ended."""
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
        """Its exit code, after it has ended."""
        return self._process.returncode

    def problem(self) -> str:
        """Return the reason for its failure, in one line; empty if it succeeded."""
        last = last_words(self.output())
        if self.timed_out:
            return f"it did not end in time; last: {last}"
        return f"exit code {self.code}: {last}" if self.code else ""


def run(words: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None) -> str:
    """Return a command's output; RuntimeError if it fails or takes longer."""
    command = Command(words, seconds=seconds, environment=environment)
    if problem := command.problem():
        raise RuntimeError(problem)
    return command.output()


def last_words(text: str) -> str:
    """Return the last line with an error, or the last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "differ" in line]
    return one_line((telling or lines or ["nothing"])[-1], 180)


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as flags."""
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def common(job: Job) -> dict[str, Any]:
    """Return the settings common to all training runs: this machine alone, one rank, no compilation, short timeouts."""
    return {
        "config": "quickstart",
        "run.device": job.device,
        "run.hostfile": "none",
        "run.timeout_seconds": job.pick(60, 300),
        "parallel.context": 1,
        "train.compile": "off",
    }


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the records in a training run's metrics.jsonl; empty if it wrote none."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Return the step records of a training run."""
    return [record for record in records(folder) if record.get("kind") == "train"]

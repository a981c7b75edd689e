"""Runs steps, each in its own process with a time limit, within a deadline for all of them.

Steps that are not timed run in parallel as the cores allow; a timed step runs alone. After each step the report and the
archive are rewritten, so that an interruption keeps all earlier results.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.first_gpu.archive import write_archive
from benchmarks.first_gpu.checks import ROOT, load_checks, module_of
from benchmarks.first_gpu.report import Outcome, judge, line, skipped_outcome, table
from benchmarks.first_gpu.steps import Step

_LEAST_SHARE = 0.5
"""A step is not started if less than this fraction of its limit remains before the deadline."""
_DRY_SECONDS = 900.0
"""A step's limit in a dry run, in which nothing is timed."""
_TICK_SECONDS = 0.1


class Ended(BaseException):
    """Raised when a signal ends the run."""


@dataclass
class Running:
    """A step's process."""

    step: Step
    process: subprocess.Popen[bytes]
    begun: float
    limit: float

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.begun


def startable(
    pending: Sequence[Step], running: Collection[Step], ended: Collection[str], *, cores: int
) -> Iterator[Step]:
    """Return the steps that may start now, in order; no step overtakes one that runs alone."""
    free = cores - sum(min(step.cores, cores) for step in running)
    known = {step.name for step in (*pending, *running)}
    nobody = not running
    for position, step in enumerate(pending):
        if step.alone:
            if position == 0 and nobody:
                yield step
            return
        waits = any(name in known and name not in ended for name in step.after)
        if waits or min(step.cores, cores) > free:
            continue
        free -= min(step.cores, cores)
        nobody = False
        yield step


class Run:
    """Steps in progress: waiting, running, and finished."""

    def __init__(
        self, steps: Sequence[Step], *, device: str, scratch: Path, out: Path, seconds: float, cores: int, facts: dict
    ) -> None:
        """Initialize; ``seconds`` is the limit for all steps together, and ``facts`` go into the report."""
        self.pending, self.running, self.outcomes = list(steps), [], []
        self.device, self.scratch, self.out, self.cores = device, scratch, out, cores
        self.deadline, self.facts = time.monotonic() + seconds, facts
        self.names = [step.name for step in steps]
        self.environment = environment_of(device, scratch)

    def all_steps(self) -> list[Outcome]:
        """Run all steps, print a line for each, and return their outcomes in order."""
        with signals_end():
            try:
                while self.pending or self.running:
                    self._start()
                    self._collect()
                    time.sleep(_TICK_SECONDS)
            except Ended:
                for one in list(self.running):
                    self._end(one, "ended by a signal")
                for step in self.pending:
                    self._add(skipped_outcome(step, "ended by a signal"))
            finally:
                for one in self.running:
                    kill_session(one.process)
        return self._in_order()

    def _start(self) -> None:
        ended = {outcome.name for outcome in self.outcomes}
        for step in list(startable(self.pending, [one.step for one in self.running], ended, cores=self.cores)):
            self.pending.remove(step)
            left = self.deadline - time.monotonic()
            limit = _DRY_SECONDS if self.device == "cpu" else step.seconds
            if left < (step.least or _LEAST_SHARE * step.seconds):
                self._add(skipped_outcome(step, "out of time"))
                continue
            self.running.append(self._launch(step, min(limit, left)))

    def _launch(self, step: Step, limit: float) -> Running:
        words = [*module_of(step.module), *step.which, "--device", self.device]
        words += ["--scratch", str(self.scratch), "--name", step.name]
        # Small sizes on a busy CPU: threads would wait for one another.
        threads = 1 if self.device == "cpu" else min(step.cores, self.cores)
        environment = self.environment | {"OMP_NUM_THREADS": str(threads)}
        with (self.scratch / f"{step.name}.log").open("wb") as log:
            # A separate session: all processes that the step starts end with it.
            process = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        return Running(step, process, time.monotonic(), limit)

    def _collect(self) -> None:
        for one in list(self.running):
            code = one.process.poll()
            if code is not None:
                self._end(one, f"exit code {code}" if code else "")
            elif one.seconds > one.limit:
                self._end(one, f"ended after its limit of {one.limit:.0f} s")

    def _end(self, one: Running, problem: str) -> None:
        kill_session(one.process)
        self.running.remove(one)
        checks = load_checks(self.scratch / f"{one.step.name}.json")
        card = self.facts.get("card", "")
        self._add(judge(one.step, checks, seconds=one.seconds, problem=problem, dry=self.device == "cpu", card=card))

    def _add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        print(line(outcome), flush=True)
        self._write()

    def _write(self) -> None:
        outcomes = self._in_order()
        report = self.facts | {"dry": self.device == "cpu", "steps": [outcome.to_json() for outcome in outcomes]}
        (self.scratch / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (self.scratch / "table.txt").write_text(table(outcomes) + "\n")
        write_archive(self.scratch, self.out)

    def _in_order(self) -> list[Outcome]:
        return sorted(self.outcomes, key=lambda outcome: self.names.index(outcome.name))


@contextmanager
def signals_end() -> Iterator[None]:
    """Raise ``Ended`` within the ``with`` block at the first signal to end."""

    def end(number: int, frame: Any) -> None:
        # A second signal would interrupt the archive that the first one requests.
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise Ended

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        for number in before:
            signal.signal(number, end)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """End a process and all its descendants."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment_of(device: str, scratch: Path) -> dict[str, str]:
    """Return the steps' environment: the user's settings stay; caches are in the scratch folder."""
    given: Mapping[str, str] = os.environ
    caches = {"LONGCTX_CACHE": "longctx", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    defaults = {name: str(scratch / "cache" / folder) for name, folder in caches.items()}
    # The ring's ranks are on this machine.
    defaults |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    paths = [str(ROOT), *filter(None, [given.get("PYTHONPATH", "")])]
    fixed = {"DS_ACCELERATOR": device, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    return defaults | dict(given) | fixed

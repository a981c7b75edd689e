"""A tiny run that meets a fault, goes on, and is compared with a run that nothing befell."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher.metrics.record import read_metrics
from launcher.supervise.progress import discard_steps, last_step
from longctx.checkpoint_format import CheckpointReader, list_checkpoints
from longctx.errors import CheckpointError
from tests.faults import FaultRow, FaultRows, verdict
from tests.launcher.runs import flags
from tests.launcher.test_accidents import Accident, Outcome, Place, start
from tests.launcher.workers import rows, run, train

RUN = {"parallel.expert": 2, "run.hostfile": "none"}
"""What every run of the suite has: hops of keys and values, and all-to-alls of tokens."""
SHORT = {"run.timeout_seconds": 6.0, "run.meet_seconds": 6.0}
"""Time-outs of runs that hang."""
NOWHERE = Place("nowhere", "launcher.training.trainer", "validate", call=10_000)
"""Where nothing happens."""
NO_ACCIDENT = Accident(rank=0, place=NOWHERE, kind="RuntimeError", ranks=2)

_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")


@dataclass(frozen=True)
class Recovered:
    """What became of a run that went on after a fault."""

    steps_lost: int
    beyond_checkpoint: int
    equal: bool


@dataclass(frozen=True)
class Scene:
    """One run of a test, in a folder of its own."""

    shards: Path
    undisturbed: Path
    """The folder of a run with the same settings."""
    folder: Path
    rows: FaultRows
    names: dict[Path, str] = field(default_factory=dict)
    """What verdicts call folders."""

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    def settings(self, changed: Mapping[str, Any] | None = None) -> list[str]:
        """The flags of the run."""
        return flags(self.shards, self.run, {**RUN, **(changed or {})})

    def strike(
        self, accident: Accident = NO_ACCIDENT, changed: Mapping[str, Any] | None = None, *, limit: float = 90.0
    ) -> Outcome:
        """Start the run on ranks without a launcher, as between machines, and wait for the end of the last one."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / "output").unlink(missing_ok=True)
        return start(accident, self.settings(changed), self.folder, limit=limit)

    def refused(self, words: str, code: int, changed: Mapping[str, Any] | None = None) -> tuple[str, float]:
        """Start the run, which must be refused on every rank with this code: the verdict, and seconds until it."""
        began = time.monotonic()
        outcome = self.strike(NO_ACCIDENT, changed)
        seconds = time.monotonic() - began
        assert outcome.codes == [code] * len(outcome.codes), outcome.text
        assert "Traceback" not in outcome.text, outcome.text
        return self.seen(outcome.text, words), seconds

    def seen(self, text: str, words: str) -> str:
        """The verdict with these words, in an output."""
        return verdict(text, words, {**self.names, self.run: "RUN", self.folder: "HERE"})

    def logged(self, words: str, *, rank: int = 0) -> tuple[str, float]:
        """The first line of a rank's log with these words, and the seconds from the fault to it."""
        log = (self.run / "logs" / f"rank_{rank}.log").read_text()
        lines = log.splitlines()
        number = next(number for number, line in enumerate(lines) if words in line)
        line = lines[number]
        # Of a message of several lines the first one has the time.
        stamped = [stamp for stamp in map(_STAMP.match, lines[: number + 1]) if stamp]
        when = datetime.strptime(stamped[-1][0], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        return self.seen(line, words), when - float((self.folder / "happened").read_text())

    def recover(self, resume: str = "latest", *, taken: int | None = None) -> Recovered:
        """Go on to the last step, and compare. Without a checkpoint the run begins anew.

        ``taken`` are the steps before the fault, where the folder does not say it.
        """
        good = newest_good(self.run)
        if taken is None:
            taken = last_step(self.run) or 0
        if not list_checkpoints(self.run):
            resume = "no"
            discard_steps(self.run)
        run(train, 2, self.shards, self.run, {"parallel.expert": 2, "run.resume": resume})
        resumed = 0
        if resume != "no":
            resumed = [row["step"] for row in read_metrics(self.run) if row.get("event") == "resume"][-1]
        return Recovered(max(taken - resumed, 0), good - resumed, equal(self.run, self.undisturbed))

    def went_on(self) -> Recovered:
        """Of a run that a fault has not ended."""
        return Recovered(0, 0, equal(self.run, self.undisturbed))

    def record(
        self, group: str, kind: str, *, injected: str, seen: str, seconds: float, recovered: Recovered | None = None
    ) -> None:
        """Go on, unless the run has, and keep the row."""
        recovered = recovered or self.recover()
        self.rows.add(
            FaultRow(
                group=group,
                kind=kind,
                injected=injected,
                seen=seen,
                seconds=round(seconds, 2),
                steps_lost=recovered.steps_lost,
                beyond_checkpoint=recovered.beyond_checkpoint,
                equal=recovered.equal,
            )
        )


def newest_good(folder: Path) -> int:
    """The step of the newest checkpoint whose files are whole; 0 without one."""
    for path in reversed(list_checkpoints(folder)):
        try:
            if not CheckpointReader(path).verify():
                return int(path.name.removeprefix("step_"))
        except CheckpointError:
            continue
    return 0


def equal(one: Path, other: Path) -> bool:
    """Whether two runs have the same metrics, timings apart, and the same last checkpoint, to the last bit."""
    files = [CheckpointReader(list_checkpoints(folder)[-1]).manifest["files"] for folder in (one, other)]
    return rows(one) == rows(other) and files[0] == files[1]

"""Run folder reader for the report."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher.metrics.goodput.account import Goodput, read_goodput
from launcher.metrics.record import DISCARDED_FILE, METRICS_FILE, Record, read_metrics
from launcher.report.audits import audit_events
from launcher.report.evaluation.evaluation_folder import Evaluation, load_evaluations
from launcher.run_folder import CONFIG_FILE
from longctx.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Contents of a run folder, read once."""

    name: str
    records: list[Record]
    config: dict[str, Any]
    num_discarded: int
    """Line count of ``metrics.discarded.jsonl``."""
    audits: list[Record] = field(default_factory=list)
    """Wrong-number events, including those in repeated steps."""
    goodput: Goodput = field(default_factory=lambda: Goodput(attempts=()))
    """Account of its seconds; without attempts if the run kept no timeline."""
    evaluations: list[Evaluation] = field(default_factory=list)
    """Evaluations in folders inside the run folder."""
    evaluation_errors: list[str] = field(default_factory=list)
    """Error messages for evaluations that cannot be read."""

    @cached_property
    def train(self) -> list[Record]:
        """Train records, by step."""
        return self.of_kind("train")

    @cached_property
    def validation_records(self) -> list[Record]:
        """Validation records, by step."""
        return self.of_kind("validation")

    def of_kind(self, kind: str) -> list[Record]:
        """Return records of one kind, by step."""
        return sorted((record for record in self.records if record["kind"] == kind), key=lambda record: record["step"])

    @property
    def resumed_steps(self) -> list[int]:
        return sorted({record["step"] for record in self.of_kind("event") if record["event"] == "resume"})

    def tokens_at(self, step: int) -> int | None:
        """Return the tokens read by the end of this step; None if unknown."""
        if step == 0:
            return 0
        return self._tokens_by_step.get(step)

    @cached_property
    def _tokens_by_step(self) -> dict[int, int]:
        return {record["step"]: record["tokens"] for record in self.train if record.get("tokens") is not None}

    @property
    def total_steps(self) -> int | None:
        """``train.steps`` in the resolved config."""
        steps = self.config.get("train", {}).get("steps")
        # The file may have been edited by hand; its report is still useful.
        if not isinstance(steps, int):
            return None
        return steps


def load_run(folder: Path) -> RunData:
    """Read a run folder's files; raise DataError naming those that are missing."""
    missing = [name for name in (CONFIG_FILE, METRICS_FILE) if not (folder / name).is_file()]
    if missing:
        problem = f"holds no {' and no '.join(missing)}"
        if not folder.is_dir():
            problem = "does not exist"
        raise DataError(
            f"{folder} is not a run folder: it {problem}.\nGive the folder set as run.output_dir; its files appear "
            "with the first logged step."
        )
    try:
        config = tomllib.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{folder / CONFIG_FILE}: not TOML: {error}") from error
    num_discarded = 0
    # Count newlines only: this file may contain lines that a kill cut short.
    if (folder / DISCARDED_FILE).is_file():
        num_discarded = (folder / DISCARDED_FILE).read_bytes().count(b"\n")
    evaluations, errors = load_evaluations(folder)
    records = read_metrics(folder)
    return RunData(
        name=folder.resolve().name,
        records=records,
        config=config,
        num_discarded=num_discarded,
        audits=audit_events(folder, records),
        goodput=read_goodput(folder),
        evaluations=evaluations,
        evaluation_errors=errors,
    )

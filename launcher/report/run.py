"""Read a run folder's files for the report."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.metrics.record import DISCARDED_FILE, METRICS_FILE, Record, read_metrics
from launcher.run_folder import CONFIG_FILE, ENVIRONMENT_FILE
from longctx.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run folder's files say, read once."""

    name: str
    records: list[Record]
    config_text: str
    config: dict[str, Any]
    environment: dict[str, Any]
    """Empty when the file is missing."""
    num_discarded: int
    """Lines of ``metrics.discarded.jsonl``."""

    def of_kind(self, kind: str) -> list[Record]:
        """The records of one kind, by step."""
        return sorted((record for record in self.records if record["kind"] == kind), key=lambda record: record["step"])

    @property
    def train(self) -> list[Record]:
        return self.of_kind("train")

    @property
    def validations(self) -> list[Record]:
        return self.of_kind("validation")

    @property
    def resumed_steps(self) -> list[int]:
        return sorted({record["step"] for record in self.of_kind("event") if record["event"] == "resume"})

    @property
    def total_steps(self) -> int | None:
        """``train.steps`` of the resolved config."""
        steps = self.config.get("train", {}).get("steps")
        return steps if isinstance(steps, int) else None


def load_run(folder: Path) -> Run:
    """Read a run folder's files; DataError names what is missing."""
    missing = [name for name in (CONFIG_FILE, METRICS_FILE) if not (folder / name).is_file()]
    if missing:
        what = "does not exist" if not folder.is_dir() else f"holds no {' and no '.join(missing)}"
        raise DataError(
            f"{folder} is not a run folder: it {what}.\n"
            "Give the folder that run.output_dir named; it is filled when the first step is logged."
        )
    config_text = (folder / CONFIG_FILE).read_text(encoding="utf-8")
    try:
        config = tomllib.loads(config_text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{folder / CONFIG_FILE}: not TOML: {error}") from error
    discarded = folder / DISCARDED_FILE
    return Run(
        name=folder.resolve().name,
        records=read_metrics(folder),
        config_text=config_text,
        config=config,
        environment=_load_environment(folder / ENVIRONMENT_FILE),
        num_discarded=discarded.read_bytes().count(b"\n") if discarded.is_file() else 0,
    )


def _load_environment(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        environment = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    return environment if isinstance(environment, dict) else {"environment": environment}

"""Files in an evaluation folder: settings and one row per sample, readable without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from longctx.errors import DataError
from longctx.evaluation import TASKS, ScoreRow
from longctx.evaluation.losses import LossRow
from longctx.untrusted.strict_json import parse_json, read_json

SETTINGS_FILE = "evaluation.json"
RESULTS_FILE = "results.jsonl"
SUMMARY_FILE = "summary.json"

Key = tuple[str, int, int]
"""Sample key: task, length and index."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Contents of an evaluation folder."""

    folder: Path
    settings: dict[str, Any]
    scores: list[ScoreRow]
    losses: list[LossRow]

    @property
    def caption(self) -> str:
        """Model and date, for every plot."""
        return f"{self.settings['model']}, {self.settings['date']}"


def load_evaluation(folder: Path) -> Evaluation:
    """Read an evaluation folder; raise DataError naming the missing or damaged file."""
    rows = [row for _, row in sorted(read_rows(folder).items(), key=lambda item: _order(item[0]))]
    return Evaluation(
        folder=folder,
        settings=read_settings(folder),
        scores=[row for row in rows if isinstance(row, ScoreRow)],
        losses=[row for row in rows if isinstance(row, LossRow)],
    )


def find_evaluations(run_folder: Path) -> list[Path]:
    """Return evaluation folders in a run folder, at most two levels down."""
    patterns = (f"*/{SETTINGS_FILE}", f"*/*/{SETTINGS_FILE}")
    return sorted(path.parent for pattern in patterns for path in run_folder.glob(pattern))


def load_evaluations(run_folder: Path) -> tuple[list[Evaluation], list[str]]:
    """Return the evaluations in a run folder, and errors from unreadable ones, which must not prevent the report."""
    found, errors = [], []
    for folder in find_evaluations(run_folder):
        try:
            found.append(load_evaluation(folder))
        except DataError as error:
            errors.append(str(error))
    return found, errors


def read_settings(folder: Path) -> dict[str, Any]:
    """Read ``evaluation.json``; raise DataError if it cannot be read or lacks model or date."""
    path = folder / SETTINGS_FILE
    try:
        settings = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}. Evaluate into another --output.") from error
    if not isinstance(settings, dict) or not {"model", "date"} <= set(settings):
        raise DataError(f"{path} is not an evaluation's settings file. Evaluate into another --output.")
    return settings


def read_rows(folder: Path) -> dict[Key, ScoreRow | LossRow]:
    """Return ``results.jsonl`` rows by sample; empty if the file does not exist."""
    rows: dict[Key, ScoreRow | LossRow] = {}
    path = folder / RESULTS_FILE
    for number, line in enumerate(_whole_lines(path), 1):
        try:
            row = _row_of(parse_json(line.encode()))
        except (ValueError, TypeError, LookupError) as error:
            raise DataError(f"{path}, line {number}, is not an evaluation row: {error!r}. Remove the line.") from error
        rows[row.task, row.length, row.index] = row
    return rows


def whole_bytes(path: Path) -> int:
    """Return the file's size in bytes up to the end of its last complete line."""
    if not path.is_file():
        return 0
    # rfind returns −1 if no line is complete, which gives 0.
    return path.read_bytes().rfind(b"\n") + 1


def encode_row(row: ScoreRow | LossRow) -> str:
    """Format a row as a ``results.jsonl`` line."""
    kind = "loss"
    if isinstance(row, ScoreRow):
        kind = "score"
    return json.dumps({"kind": kind, **row.cells()}, ensure_ascii=False) + "\n"


def _whole_lines(path: Path) -> Iterator[str]:
    """Yield complete lines: a kill may have cut the last one."""
    if path.is_file():
        yield from path.read_bytes()[: whole_bytes(path)].decode("utf-8").split("\n")[:-1]


def _row_of(cells: dict[str, Any]) -> ScoreRow | LossRow:
    if cells.pop("kind") == "loss":
        return LossRow.of_cells(cells)
    # Rows from earlier releases have no excerpt.
    cells.setdefault("excerpt", "")
    # Require exactly these columns: a row from another release would be misread.
    names = [column.name for column in fields(ScoreRow)]
    return ScoreRow(**{**{name: cells[name] for name in names}, "answers": tuple(cells["answers"])})


def _order(key: Key) -> tuple[int, str, int, int]:
    """Return a sort key in task table order, so that stops and resumes do not affect the order."""
    task, length, index = key
    # Tasks unknown to this release come last.
    number = len(TASKS)
    if task in TASKS:
        number = list(TASKS).index(task)
    return number, task, length, index

"""Files of an evaluation's folder: its settings, and one row per sample. They are read without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from longctx.errors import DataError
from longctx.evaluation import TASKS, ScoreRow
from longctx.evaluation.losses import LossRow
from longctx.untrusted.reading import parse_json, read_json

SETTINGS_FILE = "evaluation.json"
RESULTS_FILE = "results.jsonl"
SUMMARY_FILE = "summary.json"

Key = tuple[str, int, int]
"""Task, length and index: which sample a row is of."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Contents of an evaluation folder's files."""

    folder: Path
    settings: dict[str, Any]
    scores: list[ScoreRow]
    losses: list[LossRow]

    @property
    def caption(self) -> str:
        """Model and date, for every picture."""
        return f"{self.settings['model']}, {self.settings['date']}"


def load_evaluation(folder: Path) -> Evaluation:
    """Read an evaluation's folder; raise DataError naming the file that is missing or damaged."""
    rows = [row for _, row in sorted(read_rows(folder).items(), key=lambda item: _order(item[0]))]
    return Evaluation(
        folder=folder,
        settings=read_settings(folder),
        scores=[row for row in rows if isinstance(row, ScoreRow)],
        losses=[row for row in rows if isinstance(row, LossRow)],
    )


def find_evaluations(run_folder: Path) -> list[Path]:
    """Return the folders of evaluations in a run folder, at most two levels down."""
    patterns = (f"*/{SETTINGS_FILE}", f"*/*/{SETTINGS_FILE}")
    return sorted(path.parent for pattern in patterns for path in run_folder.glob(pattern))


def load_evaluations(run_folder: Path) -> tuple[list[Evaluation], list[str]]:
    """Return the evaluations in a run folder, and errors of unreadable ones, which must not prevent the report."""
    found, unread = [], []
    for folder in find_evaluations(run_folder):
        try:
            found.append(load_evaluation(folder))
        except DataError as error:
            unread.append(str(error))
    return found, unread


def read_settings(folder: Path) -> dict[str, Any]:
    """Read ``evaluation.json``; raise DataError if it cannot be read or lacks model or date."""
    path = folder / SETTINGS_FILE
    try:
        settings = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}. Evaluate into another --output.") from error
    if not isinstance(settings, dict) or not {"model", "date"} <= set(settings):
        raise DataError(f"{path} is not the file of an evaluation. Evaluate into another --output.")
    return settings


def read_rows(folder: Path) -> dict[Key, ScoreRow | LossRow]:
    """Return the rows of ``results.jsonl`` by sample; empty if the file does not exist."""
    rows: dict[Key, ScoreRow | LossRow] = {}
    path = folder / RESULTS_FILE
    for number, line in enumerate(_whole_lines(path), 1):
        try:
            row = _row_of(parse_json(line.encode()))
        except (ValueError, TypeError, LookupError) as error:
            raise DataError(
                f"{path}, line {number}, is no row of an evaluation: {error!r}. Remove the line."
            ) from error
        rows[row.task, row.length, row.index] = row
    return rows


def whole_bytes(path: Path) -> int:
    """Return the bytes of a file up to the end of its last complete line."""
    if not path.is_file():
        return 0
    return path.read_bytes().rfind(b"\n") + 1


def line_of(row: ScoreRow | LossRow) -> str:
    """Format a row as a line of ``results.jsonl``."""
    kind = "loss"
    if isinstance(row, ScoreRow):
        kind = "score"
    return json.dumps({"kind": kind, **row.cells()}, ensure_ascii=False) + "\n"


def _whole_lines(path: Path) -> Iterator[str]:
    """Yield the complete lines: a kill may have cut the last one."""
    if path.is_file():
        yield from path.read_bytes()[: whole_bytes(path)].decode("utf-8").split("\n")[:-1]


def _row_of(cells: dict[str, Any]) -> ScoreRow | LossRow:
    if cells.pop("kind") == "loss":
        return LossRow.of_cells(cells)
    # Rows of earlier releases have no excerpt.
    cells.setdefault("excerpt", "")
    # Require exactly these columns: another release's row would be misread.
    names = [column.name for column in fields(ScoreRow)]
    return ScoreRow(**{**{name: cells[name] for name in names}, "answers": tuple(cells["answers"])})


def _order(key: Key) -> tuple[int, str, int, int]:
    """Return a sort key by the table of tasks, so that the order does not depend on stops and resumes."""
    task, length, index = key
    number = len(TASKS)
    if task in TASKS:
        number = list(TASKS).index(task)
    return number, task, length, index

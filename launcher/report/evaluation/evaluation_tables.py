"""Evaluation results as rows of plain values, for summary.json, CSV files and plots."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from launcher.report.evaluation.evaluation_folder import Evaluation
from longctx.evaluation import areas_by_task, by_depth, by_length, overall
from longctx.evaluation.intervals import Estimate
from longctx.evaluation.losses import LossEstimate, LossRow, loss_by_bin, loss_over_texts
from longctx.files import write_atomically

Rows = list[dict[str, Any]]

RULER_TASKS = 13
"""Tasks in NVIDIA's average."""


def score_rows(evaluation: Evaluation) -> Rows:
    """Return rows with task, length, mean score, interval and sample count."""
    cells = by_length(evaluation.scores)
    return [{"task": cell.task, "length": cell.length, **_score(cell.score)} for cell in cells]


def depth_rows(evaluation: Evaluation, task: str) -> Rows:
    """Return one row per length and depth of a task's grid; untested cells have no score, and n = 0."""
    cells = {(cell.length, cell.depth): cell for cell in by_depth(evaluation.scores) if cell.task == task}
    lengths = sorted({length for length, _ in cells})
    # Include depths from the settings that have no sample yet: the heat map shows them as blank cells.
    depths = sorted({depth for _, depth in cells if depth is not None} | set(evaluation.settings.get("depths", [])))
    rows: Rows = []
    for length in lengths:
        for depth in depths:
            score: dict[str, Any] = {"mean": None, "low": None, "high": None, "n": 0}
            if (length, depth) in cells:
                score = _score(cells[length, depth].score)
            rows.append({"task": task, "length": length, "depth": depth, **score})
    return rows


def tasks_with_depth(evaluation: Evaluation) -> list[str]:
    """Return tasks with a heat map."""
    return list(dict.fromkeys(row.task for row in evaluation.scores if row.depth is not None))


def area_rows(evaluation: Evaluation) -> Rows:
    """Return each task's area under score over log length, then the overall area."""
    if not evaluation.scores:
        return []
    found = areas_by_task(evaluation.scores) | {"all tasks": overall(evaluation.scores)}
    return [{"task": task, **_score(area)} for task, area in found.items()]


def ruler_rows(evaluation: Evaluation) -> Rows:
    """Return RULER scores in per cent: one row per task, then their average; one column per length."""
    cells = [cell for cell in by_length(evaluation.scores) if cell.task.startswith("ruler_")]
    lengths = sorted({cell.length for cell in cells})
    percent = {(cell.task, cell.length): 100 * cell.score.mean for cell in cells}
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    if not tasks:
        return []
    rows: Rows = [
        {"task": task, **{str(length): _rounded(percent.get((task, length))) for length in lengths}} for task in tasks
    ]
    # The label names the task count: an average over a selection is not NVIDIA's.
    average: dict[str, Any] = {"task": f"average of {len(tasks)} of {RULER_TASKS} tasks"}
    for length in lengths:
        found = [percent.get((task, length)) for task in tasks]
        known = [value for value in found if value is not None]
        # An average over fewer tasks would not be comparable across lengths.
        average[str(length)] = None
        if len(known) == len(tasks):
            average[str(length)] = _rounded(fmean(known))
    rows.append(average)
    return rows


def loss_rows(evaluation: Evaluation) -> Rows:
    """Return token-weighted loss over all texts, per measure and length."""
    rows: Rows = []
    for (task, length), group in _groups(evaluation.losses).items():
        estimate = loss_over_texts([(row.nll, row.count) for row in group])
        rows.append({"task": task, "length": length, **_loss(estimate, sum(row.num_tokens for row in group))})
    return rows


def bin_rows(evaluation: Evaluation, kind: str) -> Rows:
    """Return loss by ``by_position`` or ``by_distance``, for each length."""
    rows: Rows = []
    for (task, length), group in _groups(evaluation.losses).items():
        for start, stop, estimate in loss_by_bin(group, kind):
            found = _loss(estimate, estimate.num_tokens)
            rows.append({"task": task, "length": length, "start": start, "stop": stop, **found})
    return rows


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as CSV, with the first row's columns; unknown values are empty cells."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())
    return path


def sample_score_rows(evaluation: Evaluation) -> Rows:
    """Return one score row per sample, with its answers joined by a bar."""
    return [{**row.cells(), "answers": " | ".join(row.answers)} for row in evaluation.scores]


def summary_of(evaluation: Evaluation) -> dict[str, Any]:
    """Return all results as one value."""
    return {
        "settings": evaluation.settings,
        "scores": score_rows(evaluation),
        "by_depth": {task: depth_rows(evaluation, task) for task in tasks_with_depth(evaluation)},
        "areas": area_rows(evaluation),
        "ruler": ruler_rows(evaluation),
        "losses": loss_rows(evaluation),
        "loss_by_position": bin_rows(evaluation, "by_position"),
        "loss_by_distance": bin_rows(evaluation, "by_distance"),
    }


def _groups(rows: Sequence[LossRow]) -> dict[tuple[str, int], list[LossRow]]:
    groups: dict[tuple[str, int], list[LossRow]] = {}
    # Resumes change the file's order, so sort: sums over floats depend on it.
    for row in sorted(rows, key=lambda row: (row.task, row.length, row.index)):
        groups.setdefault((row.task, row.length), []).append(row)
    return groups


def _score(estimate: Estimate) -> dict[str, Any]:
    found = asdict(estimate)
    return {"mean": found["mean"], "low": found["low"], "high": found["high"], "n": found["count"]}


def _loss(estimate: LossEstimate | None, num_read: int) -> dict[str, Any]:
    """Return loss and perplexity; null if no token counts, for example if LongPPL finds no key token."""
    found: dict[str, Any] = dict.fromkeys(("loss", "low", "high", "perplexity"))
    found |= {"tokens": 0, "tokens_read": num_read, "texts": 0}
    if estimate is not None:
        found |= {"loss": estimate.loss, "low": estimate.low, "high": estimate.high}
        found |= {"perplexity": estimate.perplexity, "tokens": estimate.num_tokens, "texts": estimate.num_texts}
    return found


def _rounded(percent: float | None) -> float | None:
    """Round to two digits, as NVIDIA does."""
    if percent is None:
        return None
    return round(percent, 2)

"""Score rows, one per sample, and their summaries: means by length and depth, and one number over lengths."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any

from longctx.errors import DataError
from longctx.evaluation.evaluation_task import EvaluationSample, EvaluationTask
from longctx.evaluation.intervals import Estimate, estimate, weighted_sum


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """One sample's score. ``columns`` and ``cells`` convert it to a table line."""

    task: str
    length: int
    """Requested tokens."""
    depth: float | None
    """Depth of the answer; None for tasks without depth."""
    index: int
    score: float
    prompt_tokens: int
    answers: tuple[str, ...]
    output: str
    """Generated text."""
    excerpt: str = ""
    """Prompt text around the answers and at its end, if the score is below 1."""

    @classmethod
    def of(cls, task: EvaluationTask, sample: EvaluationSample, output: str) -> ScoreRow:
        """Score an output and return its row."""
        score = task.score(output, sample)
        excerpt = ""
        # One failed sample often shows whether the model or the prompt is at fault; perfect ones need no excerpt.
        if score < 1:
            excerpt = excerpt_of(sample)
        return cls(
            task=sample.task,
            length=sample.length,
            depth=sample.depth,
            index=sample.index,
            score=score,
            prompt_tokens=sample.prompt_tokens,
            answers=sample.answers,
            output=output,
            excerpt=excerpt,
        )

    @classmethod
    def columns(cls) -> list[str]:
        """Return the column names."""
        return [column.name for column in fields(cls)]

    def cells(self) -> dict[str, Any]:
        """Return the values by column; the answers become a list, as in JSON."""
        return {**asdict(self), "answers": list(self.answers)}


_CONTEXT_CHARACTERS, _END, _MOST_SPANS = 80, 300, 3
"""Excerpt sizes: characters on either side of an answer, characters at the prompt's end, and maximum answers."""


def excerpt_of(sample: EvaluationSample) -> str:
    """Return a prompt's text around its first answers, and its end, with ellipses in between."""
    size = len(sample.prompt)
    parts = [
        (max(0, start - _CONTEXT_CHARACTERS), min(size, stop + _CONTEXT_CHARACTERS))
        for start, stop in sorted(sample.spans)[:_MOST_SPANS]
    ]
    parts.append((max(0, size - _END), size))
    text, done = "", 0
    for start, stop in parts:
        # Excerpts may overlap: never repeat text.
        if start > done:
            text += " … "
        text += sample.prompt[max(start, done) : stop]
        done = max(done, stop)
    return text


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Mean over all scores with the same task, length and, in a heat map, depth."""

    task: str
    length: int
    depth: float | None
    score: Estimate


def by_length(rows: Iterable[ScoreRow]) -> list[Cell]:
    """Return a cell for each task and length, with tasks in row order and lengths ascending."""
    return _cells(((row.task, row.length, None), row.score) for row in rows)


def by_depth(rows: Iterable[ScoreRow]) -> list[Cell]:
    """Return a cell for each task, length and depth; tasks without depth are left out."""
    # A cell at depth 0 would be wrong for a task without depth.
    return _cells(((row.task, row.length, row.depth), row.score) for row in rows if row.depth is not None)


def _cells(scores: Iterable[tuple[tuple[str, int, float | None], float]]) -> list[Cell]:
    """Return a cell for each task, length and depth: tasks as they appear, the others ascending."""
    groups: dict[tuple[str, int, float | None], list[float]] = {}
    for key, score in scores:
        groups.setdefault(key, []).append(score)
    tasks = list(dict.fromkeys(task for task, _, _ in groups))
    return [
        Cell(task=task, length=length, depth=depth, score=estimate(groups[task, length, depth]))
        for task, length, depth in sorted(groups, key=lambda key: (tasks.index(key[0]), *key[1:]))
    ]


def area_over_lengths(cells: Sequence[Cell]) -> Estimate:
    """Return one number for a task: the area under its score over log length, divided by the range.

    Scores between two lengths are interpolated linearly over log length, so that each doubling counts equally. For one
    length it is the score itself.
    """
    lengths = [cell.length for cell in cells]
    if not cells or len({cell.task for cell in cells}) != 1 or lengths != sorted(set(lengths)):
        raise DataError(
            f"lengths {lengths} from {len({cell.task for cell in cells})} tasks have no area. "
            "Give one task's cells, each length once, in ascending order, as by_length does."
        )
    # A range of zero width has no area.
    if len(cells) == 1:
        return weighted_sum([(1.0, cells[0].score)])
    weights = [0.0] * len(cells)
    for at, (shorter, longer) in enumerate(pairwise(lengths)):
        # A trapezoid's area gives half the width as weight to each end.
        half = math.log(longer / shorter) / math.log(lengths[-1] / lengths[0]) / 2
        weights[at] += half
        weights[at + 1] += half
    return weighted_sum([(weight, cell.score) for weight, cell in zip(weights, cells, strict=True)])


def areas_by_task(rows: Iterable[ScoreRow]) -> dict[str, Estimate]:
    """Return each task's area."""
    return {task: area_over_lengths(list(cells)) for task, cells in groupby(by_length(rows), key=attrgetter("task"))}


def overall(rows: Iterable[ScoreRow]) -> Estimate:
    """Return one number for a model: the mean over its tasks' areas, with equal weights."""
    of_tasks = areas_by_task(rows)
    if not of_tasks:
        raise DataError("No sample was scored, so the model has no overall score.")
    # By task, not by sample: a task with more samples says no more about the model.
    return weighted_sum([(1 / len(of_tasks), area) for area in of_tasks.values()])

"""Evaluation cells (a task at a length): find those too short for any prompt before a long text is read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from longctx.errors import LengthError, LongCtxError
from longctx.evaluation.evaluation_task import EvaluationTask, Setting

Cell = tuple[str, int]
"""Task name and length."""
STAND_IN = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. " * 4
"""Stand-in for the haystack, made from short words so that no cell is wrongly called too small."""


_MOST_TOKENS = 32_768
"""Upper bound on every task's shortest prompt: making prompts at greater lengths would be a waste."""
_RULER_STEP = 4096
"""Length from which RULER's shortest prompts are larger."""


def find_skipped_cells(
    setting: Setting, tasks: Sequence[EvaluationTask], lengths: Sequence[int], *, keep_one: bool
) -> set[Cell]:
    """Return cells too short for their task's shortest prompt; ``lengths`` ascend.

    With ``keep_one``, raise the first task's LengthError if no cell is left.
    """
    found: dict[Cell, LengthError] = {}
    for task in tasks:
        # Within a group, room grows with the length: stop at the first length that fits.
        for group in by_prompts([length for length in lengths if length <= _MOST_TOKENS]):
            for length in group:
                try:
                    next(iter(task.samples(setting, length, 1)))
                except LengthError as error:
                    found[task.name, length] = error
                    continue
                except LongCtxError:
                    # A missing file or a short text is reported later, once all text is read.
                    pass
                # Longer cells fit too.
                break
    if keep_one and found and len(found) == len(tasks) * len(lengths):
        raise next(iter(found.values()))
    return set(found)


def by_prompts(lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Split lengths at RULER's step: within each part, a longer cell has more room."""
    return [n for n in lengths if n < _RULER_STEP], [n for n in lengths if n >= _RULER_STEP]


def try_samples(setting: Setting, task: EvaluationTask, length: int, count: int) -> None:
    """Make one sample of a cell, or all ``count`` if some may not fit; raise LengthError for one that does not fit."""
    next(iter(task.samples(setting, length, 1)))
    # Samples vary in names and numbers, by less than a fifth: if a sample fits in four fifths of the length, all
    # samples fit in the full length.
    smaller = length * 4 // 5
    if smaller > _MOST_TOKENS:
        return
    is_same_side = smaller >= _RULER_STEP or length < _RULER_STEP
    if not is_same_side or not _has_one(setting, task, smaller):
        for _ in task.samples(setting, length, count):
            pass


def _has_one(setting: Setting, task: EvaluationTask, length: int) -> bool:
    """Return True if the task's first sample fits in the length."""
    try:
        next(iter(task.samples(setting, length, 1)))
    except LengthError:
        return False
    return True


def is_feasible(task: str, lengths: Iterable[int], skipped_cells: Collection[Cell]) -> bool:
    """Return True if any of the task's cells has room."""
    return any((task, length) not in skipped_cells for length in lengths)


def format_cells(cells: Iterable[Cell]) -> str:
    """Format cells as text: ``ruler_cwe at 256 and 512, niah at 256``."""
    lengths: dict[str, list[int]] = {}
    for task, length in sorted(cells):
        lengths.setdefault(task, []).append(length)
    return ", ".join(
        f"{task} at {' and '.join(f'{length:,}' for length in sorted(found))}" for task, found in lengths.items()
    )

"""Cells of an evaluation, a task at a length each: which have room for a prompt, known before a long text is read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from longctx.errors import LengthError, LongCtxError
from longctx.evaluation.task import Setting, Task

Cell = tuple[str, int]
"""Name of a task, and a length."""
STAND_IN = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. " * 4
"""Text in place of the haystack: of short words, so that no cell is called too small that is not."""


_MOST_TOKENS = 32_768
"""No task's shortest prompt is longer: making one at such a length would cost more than it tells."""
_RULER_STEP = 4096
"""Length from which RULER's shortest prompts are larger."""


def cells_without_room(setting: Setting, tasks: Sequence[Task], lengths: Sequence[int], *, keep_one: bool) -> set[Cell]:
    """Return the cells whose shortest prompt is longer than their length. ``lengths`` ascend.

    With ``keep_one`` at least one must be left: raise the first task's LengthError if there is none.
    """
    found: dict[Cell, LengthError] = {}
    for task in tasks:
        for alike in by_prompts([length for length in lengths if length <= _MOST_TOKENS]):
            for length in alike:
                try:
                    next(iter(task.samples(setting, length, 1)))
                except LengthError as error:
                    found[task.name, length] = error
                    continue
                except LongCtxError:
                    # A missing file or a short text, which is reported once all text is there.
                    pass
                # Longer ones have room too.
                break
    if keep_one and found and len(found) == len(tasks) * len(lengths):
        raise next(iter(found.values()))
    return set(found)


def by_prompts(lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the lengths below RULER's step and those from it on: on each side a longer one has more room."""
    return [n for n in lengths if n < _RULER_STEP], [n for n in lengths if n >= _RULER_STEP]


def try_samples(setting: Setting, task: Task, length: int, count: int) -> None:
    """Make a sample of a cell, and all ``count`` where some may have no room; raise LengthError if one has none.

    Samples draw other names and numbers: where one of four fifths of the length has room, all of the length have.
    """
    next(iter(task.samples(setting, length, 1)))
    smaller = length * 4 // 5
    if smaller > _MOST_TOKENS:
        return
    is_same_side = smaller >= _RULER_STEP or length < _RULER_STEP
    if not is_same_side or not _has_one(setting, task, smaller):
        for _ in task.samples(setting, length, count):
            pass


def _has_one(setting: Setting, task: Task, length: int) -> bool:
    """Return whether the length has room for the task's first sample."""
    try:
        next(iter(task.samples(setting, length, 1)))
    except LengthError:
        return False
    return True


def has_room(task: str, lengths: Iterable[int], without_room: Collection[Cell]) -> bool:
    """Return whether a task has a cell with room."""
    return any((task, length) not in without_room for length in lengths)


def told(cells: Iterable[Cell]) -> str:
    """Return cells in words: ``ruler_cwe at 256 and 512, niah at 256``."""
    lengths: dict[str, list[int]] = {}
    for task, length in sorted(cells):
        lengths.setdefault(task, []).append(length)
    return ", ".join(
        f"{task} at {' and '.join(f'{length:,}' for length in sorted(found))}" for task, found in lengths.items()
    )

"""Options for ``evaluate``, checked for consistency before any file is opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from launcher.evaluation.computation import Computation
from longctx.errors import ConfigError
from longctx.evaluation.evaluation_task import DEPTHS, SEED, EvaluationTask, RulerFiles, interleave_depths
from longctx.evaluation.task_table import GROUPS, TASKS, find_tasks, task_lines

Number = TypeVar("Number", int, float)

SAMPLES = 22
"""Samples per task and length: two for each of eleven depths."""
TEACHER_FORCED_FROM = 262_144
"""Length from which an answer is not generated if one pass over the expected answer measures the same."""
TEXT_METRICS = {
    "ppl": "document loss by position and by distance; perplexity; no score",
    "longppl": "perplexity on tokens that need distant context (LongPPL's rule; the model is its own judge); no score",
}
"""Tasks that read text and score no answer."""
OF_ENCODERS = {
    "translation": "BLEU and chrF on held-out pairs; needs an encoder-decoder model, and no other task",
    "masked": "loss and accuracy on masked tokens in held-out rows; needs model.causal=false",
    "pairs": "pair head accuracy, compared with a word overlap baseline; needs model.pair_head",
}
"""Tasks for models that have an encoder or are one; each runs alone, except masked and pairs together."""
OF_IMAGES = {
    "classes": "accuracy, loss and confusions of a class head on a folder of images; needs model.classes",
    "pixels": "bits per pixel of Image GPT, compared with single colors' frequencies; needs colors of a palette",
    "probe": "accuracy of a linear classifier on each layer's features; needs --fit-data",
}
"""Tasks for models of images; each runs alone."""
_NEEDS_FILE = {"ruler_qa_1": "squad", "ruler_qa_2": "hotpotqa"}
"""RULER tasks that need a file from the user."""


@dataclass(frozen=True, kw_only=True)
class LongPPL:
    """Rule for tokens that need far context."""

    truncation: int = 4096
    """Near-context tokens that every token has."""
    window: int = 1024
    """Tokens read with one near context."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(Computation):
    """Options for one ``evaluate`` call."""

    checkpoint: Path
    output: Path
    tasks: tuple[str, ...]
    """Names as given: tasks, groups, measures."""
    lengths: tuple[int, ...]
    """Ascending and unique."""
    samples: int = SAMPLES
    haystack: str | None = None
    """Folder with text or shards, or its URL."""
    tokenizer: Path | None = None
    seed: int = SEED
    depths: tuple[float, ...] = DEPTHS
    answer_tokens: int | None = None
    teacher_forced_from: int = TEACHER_FORCED_FROM
    beyond_positions: bool = False
    chat_template: str = "none"
    """"auto" renders prompts by the model's chat template if it has one; "none" never does."""
    ruler: RulerFiles = field(default_factory=RulerFiles)
    longppl: LongPPL = field(default_factory=LongPPL)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Check the names first, so that an invalid one fails at once.
        tasks, text_metrics, _ = self.chosen()
        if self.chat_template != "none":
            _check_chat_template(tasks, text_metrics)
        if not self.lengths or min(self.lengths) < 2:
            raise ConfigError(f"--lengths {_joined(self.lengths)}: give at least one length, each at least 2 tokens.")
        if self.samples < 1:
            raise ConfigError(f"--samples {self.samples} must be at least 1.")
        if self.teacher_forced_from < 0:
            raise ConfigError(f"--teacher-forced-from {self.teacher_forced_from} must not be negative; 0 means always.")
        if self.longppl.truncation < 1 or self.longppl.window < 1:
            raise ConfigError(f"LongPPL needs a truncation and a window of at least 1 token, not {self.longppl}.")
        # In a text this short, every token has its full context: there is no far context to compare with.
        if "longppl" in self.tasks and max(self.lengths) <= self.longppl.truncation:
            raise ConfigError(
                f"longppl compares with a context of {self.longppl.truncation} tokens, and --lengths "
                f"{_joined(self.lengths)} are not longer. Use a longer length, or a smaller --longppl-truncation."
            )

    def chosen(self) -> tuple[list[EvaluationTask], list[str], list[str]]:
        """Return the scored tasks, the measures, and group members without their required user file."""
        names = [name for name in self.tasks if name not in TEXT_METRICS]
        text_metrics = [name for name in TEXT_METRICS if name in self.tasks]
        # Measures alone are valid, but ``find_tasks`` refuses an empty list.
        if not names and text_metrics:
            return [], text_metrics, []
        _check_names(names)
        tasks, left_out = [], []
        for task in find_tasks(names):
            # A group includes only tasks that can run; a task requested by name must run.
            if self._is_file_missing(task.name) and task.name not in names:
                left_out.append(task.name)
            else:
                tasks.append(task)
        return tasks, text_metrics, left_out

    def _is_file_missing(self, task: str) -> bool:
        return task in _NEEDS_FILE and getattr(self.ruler, _NEEDS_FILE[task]) is None


def split_names(text: str) -> tuple[str, ...]:
    """Split ``niah,ruler`` into unique names."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def split_lengths(text: str) -> tuple[int, ...]:
    """Split ``4096,128k,1M`` into ascending unique lengths; k is 1,024. Raise ConfigError for a non-integer."""
    return tuple(sorted(set(_numbers(text, _tokens, "--lengths", "integer token counts: --lengths 4096,128k"))))


def _tokens(text: str) -> int:
    """Parse a token count; the suffixes ``k`` and ``M`` are powers of 1,024."""
    number = text.strip().lower()
    power = {"k": 1, "m": 2}.get(number[-1:], 0)
    return int(number[: len(number) - bool(power)]) * 1024**power


def split_depths(text: str) -> tuple[float, ...]:
    """Split ``0,0.5,1`` into depths in sampling order; raise ConfigError for a non-number."""
    found = _numbers(text, float, "--depths", "fractions from 0 to 1: --depths 0,0.5,1")
    return interleave_depths(found) if found else ()


def lines_of_tasks() -> list[str]:
    """Return one line per task, measure and group."""
    width = max(len(name) for name in TASKS | GROUPS)
    lines = list(task_lines())
    lines += [f"{name:{width}}  {description}" for name, description in TEXT_METRICS.items()]
    lines += [f"{name:{width}}  {description}" for name, description in (OF_ENCODERS | OF_IMAGES).items()]
    lines += [f"{name:{width}}  all of: {', '.join(members)}" for name, members in GROUPS.items()]
    return lines


def _numbers(text: str, kind: Callable[[str], Number], flag: str, wanted: str) -> list[Number]:
    try:
        # int() also accepts underscores as in configs: 131_072.
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: give {wanted}.") from error


def _check_chat_template(tasks: Sequence[EvaluationTask], text_metrics: Sequence[str]) -> None:
    """Raise ConfigError if a chat template has no effect, or a task asks no question."""
    if not tasks:
        raise ConfigError(
            f"--chat-template auto has no effect: {' and '.join(text_metrics)} read plain text. Leave it out, or name "
            "a task."
        )
    mute = [task.name for task in tasks if not task.cue]
    if mute:
        raise ConfigError(
            f"--chat-template auto: {' and '.join(mute)} give a text to continue, without a question. Leave it out, "
            "or leave out these tasks."
        )


def _check_names(names: Sequence[str]) -> None:
    """Raise ConfigError for an unknown name that resembles a measure; ``find_tasks`` reports the others."""
    for name in names:
        if name in TASKS or name in GROUPS:
            continue
        nearest = get_close_matches(name, TASKS | GROUPS | TEXT_METRICS, n=1, cutoff=0.5)
        if nearest and nearest[0] in TEXT_METRICS:
            raise ConfigError(f"task {name!r} is unknown. Did you mean {nearest[0]}? `evaluate --list` lists all.")


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(str(number) for number in numbers) or "''"

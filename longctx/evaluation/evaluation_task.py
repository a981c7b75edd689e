"""Evaluation tasks: samples built from a seed, and a score for a model's output.

No model runs here. ``EvaluationTask.samples`` gives prompts and answers; ``EvaluationTask.score`` scores a model's
text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from longctx.errors import ConfigError, DataError, LengthError
from longctx.evaluation.haystack import Haystack
from longctx.tokenizer import Tokenizer


def interleave_depths(depths: Sequence[float]) -> tuple[float, ...]:
    """Return the unique depths in an order that is evenly spaced at any prefix: both ends, then middles."""
    ordered = sorted(set(depths))
    found, intervals = [ordered[0], ordered[-1]], deque([(0, len(ordered) - 1)])
    # Breadth first: halve the largest gaps before smaller ones.
    while intervals:
        low, high = intervals.popleft()
        middle = (low + high) // 2
        if low < middle < high:
            found.append(ordered[middle])
            intervals += [(low, middle), (middle, high)]
    return tuple(dict.fromkeys(found))


DEPTHS = interleave_depths([number / 10 for number in range(11)])
"""Tenths of a text, in sampling order."""

SEED = 42
"""Default seed in NVIDIA's RULER."""


@dataclass(frozen=True, kw_only=True)
class RulerFiles:
    """RULER files that no package includes; the user supplies them."""

    squad: Path | None = None
    """``squad.json`` for ``ruler_qa_1``: SQuAD 2.0's development set."""
    hotpotqa: Path | None = None
    """``hotpotqa.json`` for ``ruler_qa_2``: HotpotQA's development set, distractor setting."""
    english_words: Path | None = None
    """NVIDIA's ``english_words.json`` for ``ruler_cwe``, if the words in wonderwords are too few."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sample inputs other than task, length and index."""

    tokenizer: Tokenizer
    seed: int = SEED
    haystack: Haystack | None = None
    """Text in which needles are hidden; only tasks with ``needs_haystack`` read it."""
    depths: Sequence[float] = DEPTHS
    """Sample ``i`` takes depth ``i`` modulo their number: 0 is the prompt's start, 1 its end."""
    answer_tokens: int | None = None
    """Tokens reserved for the answer, instead of the task's own number."""
    ruler: RulerFiles = field(default_factory=RulerFiles)

    def __post_init__(self) -> None:
        invalid = [depth for depth in self.depths if not 0 <= depth <= 1]
        if invalid or not self.depths:
            raise ConfigError(f"depths={list(self.depths)}: give at least one fraction from 0 to 1.")
        if self.answer_tokens is not None and self.answer_tokens < 1:
            raise ConfigError(f"answer_tokens={self.answer_tokens} must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class EvaluationSample:
    """Prompt, and its correct continuation."""

    task: str
    length: int
    """Maximum tokens for prompt and answer together."""
    index: int
    prompt: str
    prompt_tokens: int
    """Number of ids in ``tokenizer.encode_prompt(prompt)``, including the begin id."""
    answer_tokens: int
    """Maximum tokens that the model may generate."""
    answers: tuple[str, ...]
    """References for the score."""
    target: str
    """Correct continuation of the prompt, for teacher-forced scoring. It starts with the space after the prompt."""
    depth: float | None = None
    """Requested depth of the answer, as a fraction of the text; None for tasks without depth."""
    spans: tuple[tuple[int, int], ...] = ()
    """Character spans of the answers in the prompt, unique in it; empty if they are no quotations."""


Score = Callable[[str, Sequence[str]], float]
"""Function from a model's output and the references to a score from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class EvaluationTask(ABC):
    """Named measure that builds samples and scores outputs."""

    name: str
    """Name in ``--tasks`` and tables."""
    description: str
    """One-line description."""
    prompt_budget: str
    """Filler that extends the prompt to the length, in a few words."""
    answer_tokens: int
    """Tokens reserved for the answer."""
    rule: Score
    cue: str = "Answer:"
    """Start of the answer's own text, at its last occurrence in a prompt; empty for a text to continue.

    A chat model gets the text before the cue as the question, and its reply starts with the rest.
    """
    needs_haystack: bool = False
    """Requires ``Setting.haystack``."""
    has_depth: bool = False
    """Samples have a depth."""

    @abstractmethod
    def samples(self, setting: Setting, length: int, count: int, *, start: int = 0) -> Iterator[EvaluationSample]:
        """Yield samples ``start`` to ``count``; each depends only on setting, task, length and index."""

    def score(self, output: str, sample: EvaluationSample) -> float:
        """Return the score for a model's output, 0 to 1."""
        return self.rule(output, sample.answers)


def tokens_for_answer(task: EvaluationTask, setting: Setting) -> int:
    """Return the tokens that a prompt reserves for the answer."""
    # RULER's numbers suit its tokenizers; one with shorter tokens needs more for the same answer.
    if setting.answer_tokens is not None:
        return setting.answer_tokens
    return task.answer_tokens


def required_haystack(task: EvaluationTask, setting: Setting) -> Haystack:
    """Return the haystack for a task that needs one; raise ConfigError if it is missing."""
    if setting.haystack is None:
        raise ConfigError(
            f"task {task.name} needs a haystack to hide its needles in, and the haystack is missing. "
            "Give a text or shard folder, or choose a task without a haystack: passkey, kv_retrieval, phonebook."
        )
    return setting.haystack


def too_short(task: str, length: int, *, prompt: int, answer: int) -> LengthError:
    """Return the error for a length too short for the shortest prompt with its answer."""
    # Another length has other names and numbers: a quarter more covers the longest of those.
    least = (prompt + answer) * 5 // 4
    return LengthError(
        f"length={length}: task {task} needs at least {prompt} tokens for its prompt and reserves {answer} for the "
        f"answer. Try length={least} or more."
    )


def check_target(sample: EvaluationSample, tokenizer: Tokenizer) -> None:
    """Raise DataError if the correct answer is longer than its reserved tokens."""
    # Encode without the prompt: encoding a million tokens again would change the count by at most one.
    needed = len(tokenizer.encode(sample.target))
    if needed > sample.answer_tokens:
        raise DataError(
            f"task {sample.task} reserves {sample.answer_tokens} tokens for its answer, which needs {needed} with "
            f"tokenizer {tokenizer.path}, so no model could score 1. Try answer_tokens={needed + needed // 4}."
        )

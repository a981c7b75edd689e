"""Our own tasks: each builds a prompt from a random generator and a number of filler units, and fits it to a length.

RULER's tasks are fitted as in NVIDIA's scripts: ``longctx/evaluation/ruler/``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from random import Random

from longctx.errors import DataError
from longctx.evaluation.evaluation_task import (
    EvaluationSample,
    EvaluationTask,
    Score,
    Setting,
    check_target,
    required_haystack,
    tokens_for_answer,
    too_short,
)
from longctx.evaluation.haystack import Haystack
from longctx.evaluation.scorers import starts_with

ATTEMPTS = 20
"""Maximum attempts at a sample before giving up because its answer occurs in the haystack by chance."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Prompt with a given amount of filler, and its correct answers."""

    prompt: str
    answers: tuple[str, ...]
    target: str
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class PromptSpec:
    """Builder input; the same request with more units gives the same prompt with more filler."""

    random: Random
    """Fresh for each draft: used in the same order for any number of units."""
    units: int
    depth: float
    haystack: Haystack | None

    @property
    def text(self) -> Haystack:
        """Haystack for a task that needs one."""
        assert self.haystack is not None
        return self.haystack


@dataclass(frozen=True, kw_only=True)
class IndependentTask(EvaluationTask):
    """Task with independent samples."""

    build: Callable[[PromptSpec], Draft]
    rule: Score = starts_with
    minimum: int = 1
    """Units in the shortest prompt."""
    has_depth: bool = True

    def samples(self, setting: Setting, length: int, count: int, *, start: int = 0) -> Iterator[EvaluationSample]:
        """Yield samples ``start`` to ``count``. No prompt would fit with one more unit of filler."""
        for index in range(start, count):
            yield self.sample(setting, length, index)

    def sample(self, setting: Setting, length: int, index: int) -> EvaluationSample:
        """Return one sample; raise DataError if the shortest prompt does not fit, or if the haystack is too short."""
        for attempt in range(ATTEMPTS):
            # Each attempt has its own seed. Nearly every sample needs only the first.
            sample = self._draw(setting, length, index, attempt)
            if all(sample.prompt.count(sample.prompt[start:stop]) == 1 for start, stop in sample.spans):
                # A score that can never be 1 would look like a weak model.
                check_target(sample, setting.tokenizer)
                return sample
        raise DataError(
            f"task {self.name} at length={length}: all {ATTEMPTS} draws had an answer that the haystack also contains. "
            "Give another haystack."
        )

    def _draw(self, setting: Setting, length: int, index: int, attempt: int) -> EvaluationSample:
        """Build an attempt's sample, with as much filler as fits."""
        haystack = None
        if self.needs_haystack:
            haystack = required_haystack(self, setting)
        # The seed determines the complete sample, so samples can be built in any order, and again.
        seed = f"{setting.seed}/{self.name}/{length}/{index}/{attempt}"
        depth = setting.depths[index % len(setting.depths)]
        answer_tokens = tokens_for_answer(self, setting)

        def draft_of(units: int) -> Draft:
            # A new generator each time: a draft with more filler has the same needles.
            return self.build(PromptSpec(random=Random(seed), units=units, depth=depth, haystack=haystack))

        # Encoding dominates the cost, and search, check and sample need the same numbers.
        @cache
        def tokens_of(units: int) -> int:
            return len(setting.tokenizer.encode_prompt(draft_of(units).prompt))

        units = self._fit(tokens_of, haystack, length=length, answer_tokens=answer_tokens)
        draft = draft_of(units)
        return EvaluationSample(
            task=self.name,
            length=length,
            index=index,
            prompt=draft.prompt,
            prompt_tokens=tokens_of(units),
            answer_tokens=answer_tokens,
            answers=draft.answers,
            target=draft.target,
            depth=depth if self.has_depth else None,
            spans=draft.spans,
        )

    def _fit(
        self, tokens_of: Callable[[int], int], haystack: Haystack | None, *, length: int, answer_tokens: int
    ) -> int:
        """Return the number of units that fills the length."""
        most = None
        if haystack is not None:
            most = haystack.num_words
            if most < self.minimum:
                raise DataError(
                    f"task {self.name} needs at least {self.minimum} words, and haystack {haystack.source} "
                    f"has {most}. Give a longer haystack."
                )
        needed = tokens_of(self.minimum)
        if needed + answer_tokens > length:
            raise too_short(self.name, length, prompt=needed, answer=answer_tokens)
        units = largest_fitting(tokens_of, minimum=self.minimum, most=most, budget=length - answer_tokens)
        # A text that is used up but fills the length is long enough.
        filled = tokens_of(units) + answer_tokens
        if haystack is not None and units == most and filled < length:
            raise haystack.too_short(self.name, length, filled=filled)
        return units


def largest_fitting(tokens_of: Callable[[int], int], *, minimum: int, most: int | None, budget: int) -> int:
    """Return the largest number of units that fits, or ``most`` if all of them fit.

    ``minimum`` must fit. Each call of ``tokens_of`` may encode a full prompt: there are about a dozen calls for a
    million units.
    """
    # Tokens grow about evenly with units: interpolate linearly between a number that fits and one that does not, and
    # bisect if that makes little progress. Invariant: ``low`` fits, ``high`` does not.
    low, high, low_tokens, high_tokens = _bracket(tokens_of, minimum=minimum, most=most, budget=budget)
    halve = False
    above = True
    while high - low > 1:
        width = high - low
        # If interpolation does not help, plain bisection still ends the search.
        middle = low + width // 2
        if not halve:
            guess = low + width * (budget - low_tokens) / max(1, high_tokens - low_tokens)
            # Alternate between both sides of the guess: two probes then leave a narrow range around it.
            margin = math.isqrt(width)
            middle = int(guess) - margin
            if above:
                middle = int(guess) + margin
            above = not above
            # A number outside the range is known already and would add no information.
            middle = min(max(middle, low + 1), high - 1)
        tokens = tokens_of(middle)
        if tokens <= budget:
            low, low_tokens = middle, tokens
        else:
            high, high_tokens = middle, tokens
        # More than half remains: the tokens are uneven here, and the next guess would be no better.
        halve = (high - low) * 2 > width and not halve
    return low


def _bracket(
    tokens_of: Callable[[int], int], *, minimum: int, most: int | None, budget: int
) -> tuple[int, int, int, int]:
    """Return a number of units that fits, one that does not, and their tokens.

    ``most`` fits if the second is ``most`` + 1.
    """
    low, low_tokens = minimum, tokens_of(minimum)
    # The first step is as long as the shortest prompt, so that its slope reflects filler.
    step = max(1, minimum)
    while most is None or low < most:
        high = low + step
        if most is not None:
            high = min(high, most)
        high_tokens = tokens_of(high)
        if high_tokens > budget:
            return low, high, low_tokens, high_tokens
        slope = (high_tokens - low_tokens) / (high - low)
        # Twice as far each time: even if the slope misleads, few probes reach the budget.
        step *= 2
        # Extrapolate linearly through both numbers to the budget, and a little further.
        if slope > 0:
            step = max(step, int(1.02 * (budget - high_tokens) / slope) + 1)
        low, low_tokens = high, high_tokens
    return low, low + 1, low_tokens, low_tokens

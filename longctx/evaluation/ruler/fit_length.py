"""Fitting prompts to a length as in RULER's scripts: a bisection, then fewer units for samples that are too long.

All random numbers are used in the scripts' order. Their scripts never end if the shortest prompt does not fit; these
functions raise an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from longctx.errors import ConfigError
from longctx.evaluation.evaluation_task import too_short
from longctx.tokenizer import Tokenizer

MAX_ATTEMPTS = 100
"""Attempts at the smallest size before raising an error."""


class ResampleError(Exception):
    """Signal for a sample that NVIDIA's scripts discard and repeat."""


@dataclass(frozen=True, kw_only=True)
class RulerPrompt:
    """Prompt and its answers."""

    prompt: str
    answers: list[str]


Draw = Callable[[int], RulerPrompt]
"""Function from a number of units to a prompt."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Token budget for a prompt and its answer, counted as in the scripts."""

    task: str
    tokenizer: Tokenizer
    length: int
    """Their ``--max_seq_length``."""
    answer_tokens: int
    """Their ``--tokens_to_generate``."""

    @cached_property
    def reserved(self) -> int:
        """Ids around every prompt, which the scripts do not count. Their ``--model_template_token``."""
        return len(self.tokenizer.encode_prompt(""))

    @property
    def total(self) -> int:
        """Tokens available for prompt and answer."""
        return self.length - self.reserved

    @property
    def is_short(self) -> bool:
        """True if the scripts use their smaller steps and lists."""
        return self.length < 4096

    def tokens(self, text: str) -> int:
        """Count a text's tokens, without the begin id."""
        return len(self.tokenizer.encode(text))

    def too_small(self, tokens: int) -> ConfigError:
        """Return the error for a shortest prompt with ``tokens`` tokens."""
        return too_short(self.task, self.length, prompt=tokens + self.reserved, answer=self.answer_tokens)


def bisect_units(draw: Draw, budget: Budget, *, step: int, most: int, extra_tokens: int = 0) -> int:
    """Return the units found by NVIDIA's bisection between ``step`` and ``most``; ``step`` if no number fits."""
    low, high = step, max(most, 2 * step)
    found = step
    while low <= high:
        middle = (low + high) // 2
        # Each probe uses random numbers, so the probes must be the same as in the script.
        if budget.tokens(_sample_valid(draw, middle).prompt) + extra_tokens + budget.answer_tokens <= budget.total:
            found = middle
            low = middle + 1
        else:
            high = middle - 1
    return found


def units_by_estimate(draw: Draw, budget: Budget, *, step: int, extra_tokens: int = 0) -> int:
    """Bisect up to three times the size estimated from one sample with ``step`` units."""
    tokens_per_unit = budget.tokens(_sample_valid(draw, step).prompt) / step
    most = int((budget.total / tokens_per_unit) * 3)
    return bisect_units(draw, budget, step=step, most=most, extra_tokens=extra_tokens)


def sample_fitting(draw: Draw, budget: Budget, *, units: int, step: int) -> RulerPrompt:
    """Return the next sample that fits: ``units`` at first, ``step`` fewer after each that does not."""
    shortest: int | None = None
    left = MAX_ATTEMPTS
    while left:
        # Above the smallest size, each sample is smaller than the previous one, so the loop ends.
        if units <= step:
            left -= 1
        try:
            text = draw(units)
        except ResampleError:
            pass
        else:
            tokens = budget.tokens(text.prompt)
            if tokens + budget.answer_tokens <= budget.total:
                return text
            shortest = min(shortest or tokens, tokens)
        if units > step:
            units -= step
    raise budget.too_small(shortest or budget.length)


def _sample_valid(draw: Draw, units: int) -> RulerPrompt:
    """Return the next sample that is not discarded."""
    # NVIDIA's scripts end with an error at a discarded sample here.
    while True:
        with contextlib.suppress(ResampleError):
            return draw(units)

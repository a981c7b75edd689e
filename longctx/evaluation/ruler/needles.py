"""RULER's eight needle-in-a-haystack tasks, as in ``niah.py`` from NVIDIA's scripts.

Prompts equal the script's only if every random number is used in its order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from longctx.errors import ConfigError, DataError
from longctx.evaluation.haystack import Haystack
from longctx.evaluation.random_values import random_number, uuid4
from longctx.evaluation.ruler.fit_length import (
    Budget,
    Draw,
    ResampleError,
    RulerPrompt,
    sample_fitting,
    units_by_estimate,
)
from longctx.evaluation.ruler.prompt_templates import NEEDLE, NIAH, NOISE
from longctx.evaluation.ruler.word_lists import adjective_nouns

DEPTHS_PERCENT = [int(depth) for depth in np.round(np.linspace(0, 100, num=40, endpoint=True))]
"""Possible needle depths in an essay: the share of sentences before the needle, in per cent."""


@dataclass(frozen=True, kw_only=True)
class RulerNeedles:
    """One of the eight tasks: the arguments for NVIDIA's script."""

    haystack_type: str
    """Their ``--type_haystack``: ``noise`` (one repeated line), ``needle`` (other needles) or ``essay`` (a text)."""
    key_type: str = "words"
    """Their ``--type_needle_k``: ``words``, ``numbers`` or ``uuids``."""
    value_type: str = "numbers"
    """Their ``--type_needle_v``, with the same options."""
    num_keys: int = 1
    """Their ``--num_needle_k``; at least ``num_queries`` keys are hidden."""
    num_values: int = 1
    """Their ``--num_needle_v``: values per key, each in a separate needle."""
    num_queries: int = 1
    """Their ``--num_needle_q``: keys in the question."""

    def texts(self, budget: Budget, seed: int, haystack: Haystack | None) -> Iterator[RulerPrompt]:
        """Yield prompts without end; only ``essay`` reads ``haystack``.

        Raise ConfigError if the shortest prompt does not fit, DataError if an essay would have to repeat the haystack.
        """
        draw = partial(self._draw, Random(seed), seed, haystack)
        # Words for an essay, otherwise lines. As in the script, which names it ``incremental``.
        step = 25
        if self.haystack_type == "essay":
            step = 500
        elif budget.is_short:
            step = 5
        units = units_by_estimate(draw, budget, step=step)
        # The script repeats a short haystack without a message: a different text, so a different task.
        if haystack is not None and self.haystack_type == "essay" and units > haystack.num_words:
            raise _haystack_error(draw, budget, haystack, step=step)
        while True:
            yield sample_fitting(draw, budget, units=units, step=step)

    def _draw(self, random: Random, seed: int, haystack: Haystack | None, units: int) -> RulerPrompt:
        """Return the next prompt, with ``units`` words (``essay``) or lines; the script's ``num_haystack``."""
        keys: list[str] = []
        values: list[list[str]] = []
        for _ in range(max(self.num_keys, self.num_queries)):
            keys.append(_random_text(random, self.key_type))
            values.append([_random_text(random, self.value_type) for _ in range(self.num_values)])
        needles = [self._needle(key, value) for key, of_key in zip(keys, values, strict=True) for value in of_key]
        # The script shuffles with the same seed each time: every sample permutes its needles in the same way.
        Random(seed).shuffle(needles)
        if self.haystack_type == "essay":
            assert haystack is not None
            context = _insert_in_essay(random, haystack, needles, units)
        else:
            context = self._insert_in_lines(random, needles, units)
        query_indices = random.sample(range(len(keys)), self.num_queries)
        answers = [value for index in query_indices for value in values[index]]
        return RulerPrompt(prompt=self._prompt(context, [keys[index] for index in query_indices]), answers=answers)

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(type_needle_v=self.value_type, key=key, value=value)

    def _insert_in_lines(self, random: Random, needles: list[str], units: int) -> str:
        """Return ``units`` lines of noise or other needles, with the needles between them."""
        lines = [NOISE] * units
        if self.haystack_type == "needle":
            lines = [
                self._needle(_random_text(random, self.key_type), _random_text(random, self.value_type))
                for _ in range(units)
            ]
        # Not earlier: the script also fails only after it has sampled the lines.
        if units < len(needles):
            raise ResampleError
        positions = sorted(random.sample(range(units), len(needles)), reverse=True)
        # Insert from the last line on, so that earlier line numbers stay valid.
        for position, needle in zip(positions, needles, strict=True):
            lines.insert(position, needle)
        return "\n".join(lines)

    def _prompt(self, context: str, keys: list[str]) -> str:
        """Return the prompt that asks for ``keys``, in the singular if it has a single answer."""
        query = keys[0]
        if len(keys) > 1:
            query = f"{', '.join(keys[:-1])}, and {keys[-1]}"
        template, kind = NIAH.text, self.value_type
        if self.num_queries * self.num_values == 1:
            # One after the other, as in the script: each replacement works on the previous result. The context is
            # filled in afterwards, so its words stay.
            for many_form, singular in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
                template = template.replace(many_form, singular)
            kind = kind.removesuffix("s")
        return template.format(type_needle_v=kind, context=context, query=query)


def _random_text(random: Random, kind: str) -> str:
    """Return a random key or value of a kind: ``numbers``, ``uuids`` or ``words``."""
    if kind == "numbers":
        return random_number(random)
    if kind == "uuids":
        return uuid4(random)
    return random.choice(adjective_nouns())


def _insert_in_essay(random: Random, haystack: Haystack, needles: list[str], units: int) -> str:
    """Return the haystack's first ``units`` words, with the needles between its sentences."""
    # The bisection may try more words than the haystack has: repeat them, as the script does. ``texts`` yields no such
    # prompt.
    repeats = -(-units // haystack.num_words)
    sentences = haystack.split(" ".join((haystack.words * repeats)[:units]))
    positions = sorted(int(len(sentences) * (depth / 100)) for depth in random.sample(DEPTHS_PERCENT, len(needles)))
    parts: list[str] = []
    start = 0
    for position, needle in zip(positions, needles, strict=True):
        # Two needles at one position leave an empty part and so two spaces, as in the script.
        parts += [" ".join(sentences[start:position]), needle]
        start = position
    parts.append(" ".join(sentences[start:]))
    return " ".join(parts)


def _haystack_error(draw: Draw, budget: Budget, haystack: Haystack, *, step: int) -> ConfigError | DataError:
    """Return the error for a haystack with fewer words than the length needs."""
    shortest = budget.tokens(draw(step).prompt)
    # With too short a length, more words would not help.
    if shortest + budget.answer_tokens > budget.total:
        return budget.too_small(shortest)
    filled = budget.tokens(draw(haystack.num_words).prompt) + budget.answer_tokens + budget.reserved
    return haystack.too_short(budget.task, budget.length, filled=filled)

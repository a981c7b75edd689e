"""RULER's eight needle tasks, as in ``niah.py`` from NVIDIA's scripts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from longctx.evaluation.haystack import Haystack
from longctx.evaluation.random_values import random_number, uuid4
from longctx.evaluation.ruler.fit_length import Budget, ResampleError, RulerPrompt, sample_fitting, units_by_estimate
from longctx.evaluation.ruler.prompt_templates import NEEDLE, NIAH, NOISE
from longctx.evaluation.ruler.word_lists import adjective_nouns

DEPTHS = [int(depth) for depth in np.round(np.linspace(0, 100, num=40, endpoint=True))]
"""Possible needle positions, in per cent of the sentences before them."""


@dataclass(frozen=True, kw_only=True)
class RulerNeedles:
    """One of the eight tasks: the arguments for NVIDIA's script."""

    haystack: str
    """``noise``, ``needle`` or ``essay``."""
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    def texts(self, budget: Budget, seed: int, haystack: Haystack | None) -> Iterator[RulerPrompt]:
        """Yield prompts; raise DataError if an essay would have to repeat the haystack."""
        draw = partial(self._draw, Random(seed), seed, haystack)
        # Step sizes as in the script.
        step = 25
        if self.haystack == "essay":
            step = 500
        elif budget.is_short:
            step = 5
        units = units_by_estimate(draw, budget, step=step)
        # NVIDIA's script silently repeats its essays then, which gives a different text.
        if haystack is not None and self.haystack == "essay" and units > haystack.num_words:
            minimum = budget.tokens(draw(step).prompt)
            if minimum + budget.answer_tokens > budget.total:
                raise budget.too_small(minimum)
            filled = budget.tokens(draw(haystack.num_words).prompt) + budget.answer_tokens + budget.reserved
            raise haystack.too_short(budget.task, budget.length, filled=filled)
        while True:
            yield sample_fitting(draw, budget, units=units, step=step)

    def _draw(self, random: Random, seed: int, haystack: Haystack | None, units: int) -> RulerPrompt:
        """Return the next prompt, with ``units`` sentences or words from the haystack."""
        keys: list[str] = []
        values: list[list[str]] = []
        for _ in range(max(self.num_keys, self.num_queries)):
            keys.append(_value(random, self.keys))
            values.append([_value(random, self.values) for _ in range(self.num_values)])
        sentences = [self._needle(key, value) for key, own in zip(keys, values, strict=True) for value in own]
        # The script shuffles with the same seed each time: needles have the same order in all samples.
        Random(seed).shuffle(sentences)
        if self.haystack == "essay":
            assert haystack is not None
            context = _essay(random, haystack, sentences, units)
        else:
            context = self._lines(random, sentences, units)
        query_indices = random.sample(range(len(keys)), self.num_queries)
        answers = [value for at in query_indices for value in values[at]]
        return RulerPrompt(prompt=self._prompt(context, [keys[at] for at in query_indices]), answers=answers)

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(type_needle_v=self.values, key=key, value=value)

    def _lines(self, random: Random, needles: list[str], units: int) -> str:
        """Return a haystack with the needles between its lines."""
        lines = [NOISE] * units
        if self.haystack == "needle":
            kinds = (self.keys, self.values)
            lines = [self._needle(_value(random, kinds[0]), _value(random, kinds[1])) for _ in range(units)]
        if units < len(needles):
            raise ResampleError
        # Insert from the last line on, so that earlier line numbers stay valid.
        for at, needle in zip(sorted(random.sample(range(units), len(needles)), reverse=True), needles, strict=True):
            lines.insert(at, needle)
        return "\n".join(lines)

    def _prompt(self, context: str, keys: list[str]) -> str:
        query = keys[0]
        if len(keys) > 1:
            query = f"{', '.join(keys[:-1])}, and {keys[-1]}"
        template, kind = NIAH.text, self.values
        if self.num_queries * self.num_values == 1:
            # One after the other, as in the script: each replacement works on the previous result.
            for many_form, singular in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
                template = template.replace(many_form, singular)
            kind = kind.removesuffix("s")
        return template.format(type_needle_v=kind, context=context, query=query)


def _value(random: Random, kind: str) -> str:
    if kind == "numbers":
        return random_number(random)
    if kind == "uuids":
        return uuid4(random)
    return random.choice(adjective_nouns())


def _essay(random: Random, haystack: Haystack, needles: list[str], units: int) -> str:
    """Return the haystack's first ``units`` words, with needles between its sentences."""
    # The search may try more words than the haystack has. No sample contains them.
    words = haystack.words * -(-units // haystack.num_words)
    sentences = haystack.split(" ".join(words[:units]))
    points = sorted(int(len(sentences) * (depth / 100)) for depth in random.sample(DEPTHS, len(needles)))
    parts: list[str] = []
    done = 0
    for point, needle in zip(points, needles, strict=True):
        parts += [" ".join(sentences[done:point]), needle]
        done = point
    parts.append(" ".join(sentences[done:]))
    return " ".join(parts)

"""Variable tracking, as in ``variable_tracking.py`` from NVIDIA's scripts: one chain of five, in noise."""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np

from longctx.errors import ConfigError
from longctx.evaluation.ruler.fit_length import Budget, ResampleError, RulerPrompt, sample_fitting, units_by_estimate
from longctx.evaluation.ruler.prompt_templates import NOISE, VARIABLE_TRACKING

HOPS = 4
"""Assignments after the first one."""
EXAMPLE_LENGTH = 500
"""Maximum tokens in the worked example."""
_EXAMPLE_VALUE = "12345"


def texts(budget: Budget, seed: int) -> Iterator[RulerPrompt]:
    """Yield prompts: a worked example with new names, then the text."""
    random = _Numbers(seed)
    example = _worked_example(budget, random)
    step = 10
    if budget.is_short:
        step = 5

    def draw_question(units: int) -> RulerPrompt:
        return _draw(random, units, names_of=5)

    def draw(units: int) -> RulerPrompt:
        text = draw_question(units)
        return replace(text, prompt=f"{_rename_variables(example, random)}\n{text.prompt}")

    # As in the script, search with the question alone and reserve the example's tokens.
    units = units_by_estimate(draw_question, budget, step=step, extra_tokens=budget.tokens(example))
    while True:
        yield sample_fitting(draw, budget, units=units, step=step)


class _Numbers:
    """The script's two random generators: one for names, one for values."""

    def __init__(self, seed: int) -> None:
        self.names = Random(seed)
        self.values = np.random.RandomState(seed)

    def name(self, letters: int) -> str:
        return "".join(self.names.choices(string.ascii_uppercase, k=letters))

    def value(self) -> str:
        return str(self.values.randint(10000, 99999))


def _worked_example(budget: Budget, random: _Numbers) -> str:
    """Return prompt and answer for a text with short names, as long as fits into ``EXAMPLE_LENGTH``."""

    def draw(units: int) -> RulerPrompt:
        return _draw(random, units, names_of=3)

    # The script fits its example as a prompt without room for an answer.
    small = replace(budget, length=EXAMPLE_LENGTH, answer_tokens=0)
    units = units_by_estimate(draw, small, step=5)
    try:
        text = sample_fitting(draw, small, units=units, step=5)
    except ConfigError as error:
        # No prompt length helps here: the example's length is fixed in the script.
        raise ConfigError(
            f"task {budget.task}: RULER's worked example has {EXAMPLE_LENGTH} tokens at most, and with tokenizer "
            f"{budget.tokenizer.path} the shortest one has more. Its tokens are too short: omit the task."
        ) from error
    return f"{text.prompt} {' '.join(text.answers)}\n"


def _draw(random: _Numbers, units: int, *, names_of: int) -> RulerPrompt:
    """Return a chain of assignments in ``units`` lines of noise; names have ``names_of`` letters."""
    names = [random.name(names_of) for _ in range(HOPS + 1)]
    # As in the script: a duplicate name lengthens the list, which is then discarded.
    while len(set(names)) < HOPS + 1:
        names.append(random.name(names_of))
    value = _EXAMPLE_VALUE
    if names_of == 5:
        # The script samples a value for each chain that it starts, even for one that it cannot complete.
        values = [random.value() for _ in range(0, len(names), HOPS + 1)]
        value = values[0]
    if len(names) > HOPS + 1 or units < HOPS + 1:
        raise ResampleError
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {target_name} = VAR {source_name} " for source_name, target_name in pairwise(names)]
    lines = [NOISE] * units
    for number, at in enumerate(sorted(random.names.sample(range(units), len(chain)))):
        # Each insertion moves later lines by one.
        lines.insert(at + number, chain[number])
    context = "\n".join(lines).replace(". \n", ".\n")
    prompt = VARIABLE_TRACKING.text.format(context=context, query=value, num_v=HOPS + 1)
    return RulerPrompt(prompt=prompt, answers=names)


def _rename_variables(example: str, random: _Numbers) -> str:
    """Return the worked example with other names and another value."""
    for name in example.strip().split()[-HOPS - 1 :]:
        example = example.replace(name, random.name(len(name)))
    return example.replace(_EXAMPLE_VALUE, random.value())

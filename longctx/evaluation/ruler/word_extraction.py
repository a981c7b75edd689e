"""Common and frequent words, as in NVIDIA's ``common_words_extraction.py`` and ``freq_words_extraction.py``."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np

from longctx.errors import ConfigError, DataError
from longctx.evaluation.ruler.fit_length import Budget, RulerPrompt, bisect_units, sample_fitting
from longctx.evaluation.ruler.prompt_templates import CODED_WORDS, COMMON_WORDS
from longctx.evaluation.ruler.word_lists import all_words
from longctx.untrusted.strict_json import read_json

NUM_COMMON = 10
_STEP = 10
_ESTIMATED_WORDS = 4096
_ALPHA = 2.0
_ZETA = math.pi**2 / 6
"""Riemann's zeta function at ``_ALPHA``."""
_LETTERS = 6
_NOISE = "..."


def common_words(budget: Budget, seed: int, english_words: Path | None) -> Iterator[RulerPrompt]:
    """Yield prompts: a worked example, then a list with ten words that occur more often than the others."""
    words = list(all_words())
    Random(seed).shuffle(words)
    random = Random(seed)

    def draw_list(count: int, often: int, seldom: int) -> tuple[str, list[str]]:
        """Return a list with ``count`` words, the first ten ``often`` and the rest ``seldom`` times; and these ten."""
        # The first ten in a random sample are as random as any ten.
        chosen = random.sample(_enough_words(words, count, budget, english_words), count)
        common, others = chosen[:NUM_COMMON], chosen[NUM_COMMON:]
        occurrences = common * often + others * seldom
        Random(seed).shuffle(occurrences)
        return " ".join(indexed(occurrences)), common

    def draw(units: int) -> RulerPrompt:
        if budget.is_short:
            shown, shown_common = draw_list(20, 3, 1)
            context, common = draw_list(units, 6, 1)
        else:
            shown, shown_common = draw_list(40, 10, 3)
            context, common = draw_list(units, 30, 3)
        example = f"{_common_prompt(shown)} {' '.join(indexed(shown_common))}"
        return RulerPrompt(prompt=f"{example}\n{_common_prompt(context)}", answers=common)

    per_word = budget.tokens(draw(_ESTIMATED_WORDS).prompt) / _ESTIMATED_WORDS
    units = bisect_units(draw, budget, step=_STEP, most=int(budget.total // per_word) * 2)
    while True:
        yield sample_fitting(draw, budget, units=units, step=_STEP)


def coded_words(budget: Budget, seed: int) -> Iterator[RulerPrompt]:
    """Yield prompts: coded words with frequencies that fall with the square of their rank."""
    most = budget.total - budget.answer_tokens
    step = most // 32
    random = Random(seed)
    fixed = budget.tokens(CODED_WORDS.text.format(context=""))
    # Below that, the script would never stop removing words.
    if fixed > most or step < 1:
        raise budget.too_small(max(fixed, 32))
    words = most // _LETTERS
    # As in the script, the first vocabulary only serves to find the number of words.
    text_of, _ = _coded_text(random, most // 50, seed, budget)
    while budget.tokens(text_of(words)) < most:
        words += step
    # The last number tried is the first that is too long.
    words -= step
    while True:
        text_of, answers = _coded_text(random, most // 50, seed, budget)
        fitting = words
        while budget.tokens(text_of(fitting)) > most:
            fitting -= step
        yield RulerPrompt(prompt=text_of(fitting), answers=answers)


def indexed(words: Sequence[str]) -> list[str]:
    """Number the words, from 1."""
    return [f"{number}. {word}" for number, word in enumerate(words, start=1)]


def _common_prompt(context: str) -> str:
    return COMMON_WORDS.text.format(context=context)


def _enough_words(words: list[str], count: int, budget: Budget, english_words: Path | None) -> list[str]:
    """Return the words from wonderwords, or NVIDIA's larger list if those are too few."""
    if count <= len(words):
        return words
    if english_words is None:
        raise ConfigError(
            f"task {budget.task} at length={budget.length} needs {count:,} distinct words, and "
            f"wonderwords has {len(words):,}. Give english_words.json from NVIDIA's RULER (8 MB, in its "
            "scripts/data/synthetic/json), or try a shorter length."
        )
    return _read_english_words(english_words, count)


def _read_english_words(path: Path, count: int) -> list[str]:
    """Read the words in NVIDIA's file: the values in a JSON object."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not NVIDIA's english_words.json: {error}. Copy the file itself.") from error
    if not isinstance(content, dict) or len(content) < count:
        raise DataError(f"{path} contains fewer than {count:,} words. Copy NVIDIA's english_words.json itself.")
    return list(content.values())


def _coded_text(
    random: Random, vocabulary_size: int, seed: int, budget: Budget
) -> tuple[Callable[[int], str], list[str]]:
    """Return a function from a number of words to the prompt, and the three most frequent words after the noise."""
    candidates: dict[str, None] = {}
    count = 0
    while count < vocabulary_size or len(candidates) < vocabulary_size:
        candidates["".join(random.choices(string.ascii_lowercase, k=_LETTERS))] = None
        count += 1
    vocabulary = sorted(candidates)
    Random(seed).shuffle(vocabulary)
    if len(vocabulary) < 4:
        raise budget.too_small(200)
    # The most frequent word is noise that the question says to ignore.
    vocabulary[0] = _NOISE
    ranks = np.arange(1, len(vocabulary) + 1)

    def text_of(num_words: int) -> str:
        counts = (num_words * (ranks**-_ALPHA) / _ZETA).astype(int)
        # Counts for rare words round to zero: the text may have fewer distinct words than the vocabulary.
        words = [word for word, times in zip(vocabulary, counts, strict=True) for _ in range(times)]
        Random(seed).shuffle(words)
        return CODED_WORDS.text.format(context=" ".join(words))

    return text_of, vocabulary[1:4]

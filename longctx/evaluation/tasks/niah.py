"""Needle in a haystack: short sentences with secret codes are hidden in a long text, and a question asks for some."""

from __future__ import annotations

from dataclasses import dataclass

from longctx.evaluation.haystack import insert_sentences
from longctx.evaluation.independent_samples import Draft, PromptSpec
from longctx.evaluation.random_values import KINDS, distinct, word

HEADER = "Secret codes are hidden in the following text. Read it, and remember every secret code.\n\n"
_NEEDLE = "The secret code of {key} is {code}."
_QUESTION = "\n\nQuestion: What is the secret code of {key}?\nAnswer: The secret code of {key} is"
_QUESTION_WITH_KEYS = "\n\nQuestion: What are all the secret codes of {keys}?\nAnswer: The secret codes of {keys} are"


@dataclass(frozen=True, kw_only=True)
class NeedleTask:
    """Number of needles that are hidden and queried."""

    kind: str = "number"
    """Code kind: ``number``, ``word`` or ``uuid``."""
    num_keys: int = 1
    """Needles with different keys; those without a query are distractors."""
    num_values: int = 1
    """Codes per key, each in a separate needle."""
    num_queries: int = 1
    """Keys in the question."""

    @property
    def num_answers(self) -> int:
        """Number of codes in a correct answer."""
        return self.num_values * self.num_queries

    def build(self, request: PromptSpec) -> Draft:
        """Build the prompt: ``units`` words from the haystack with the needles, and the question.

        A single answer is at the requested depth. Distractor needles are anywhere, and so are several answers.
        """
        random = request.random
        keys = distinct(random, word, self.num_keys)
        # Sample everything before the window: its length changes no needle.
        codes = distinct(random, KINDS[self.kind], self.num_keys * self.num_values)
        pairs = [(keys[at // self.num_values], code) for at, code in enumerate(codes)]
        depths = [random.random() for _ in pairs]
        if self.num_answers == 1:
            # Several answers cannot all be at one depth, so they have no heat map.
            depths[0] = request.depth
        # A different window for each sample, so that a model's luck with one text counts once.
        window = request.text.window(random.randrange(len(request.text.sentences)), request.units)
        needles = [needle_sentence(key, code) for key, code in pairs]
        context, starts = insert_sentences(window, list(zip(depths, needles, strict=True)))
        queried = pairs[: self.num_answers]
        spans: list[tuple[int, int]] = []
        for (_, code), start, needle in zip(queried, starts, needles, strict=False):
            # Search from the right: a key made from words may contain the code's letters.
            begin = len(HEADER) + start + needle.rindex(code)
            spans.append((begin, begin + len(code)))
        question = question_of(keys[0])
        if self.num_answers > 1:
            question = _QUESTION_WITH_KEYS.format(keys=", ".join(keys[: self.num_queries]))
        answers = tuple(code for _, code in queried)
        return Draft(
            prompt=f"{HEADER}{context}{question}",
            answers=answers,
            target=f" {', '.join(answers)}.",
            spans=tuple(spans),
        )


def needle_sentence(key: str, code: str) -> str:
    """Return the sentence to hide."""
    return _NEEDLE.format(key=key, code=code)


def question_of(key: str) -> str:
    """Return the question for one code, with the start of its answer."""
    return _QUESTION.format(key=key)

"""Training documents for recall: codes hidden in plain sentences, and questions about them at the end.

They read like the prompts in ``longctx/evaluation/tasks/niah.py``, answers included. Keys, codes and sentences come
from separate seeds, so no evaluation prompt is among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from longctx.errors import ConfigError
from longctx.evaluation.haystack import insert_sentences
from longctx.evaluation.random_values import KINDS, distinct, word
from longctx.evaluation.tasks.niah import HEADER, needle_sentence, question_of

_PHRASES = (
    "The baker|The teacher|The old sailor|A young clerk|The gardener|My neighbour|The doctor|A tired guard|"
    "The painter|Her brother|The miller|A stranger",
    "walks|waits|works|sits|reads|sleeps|talks|sings|looks for a job|buys bread|counts coins|sells books|"
    "writes letters|asks the way|repairs shoes|drinks tea",
    "near the market|at the station|behind the school|in the village|on the main road|under the roof|"
    "beside the church|at the window|in front of the shop|by the sea|in the kitchen|across the street",
    "every day|in winter|at noon|before dawn|after work|on Sundays|all night|once a week",
)
_PARTS = [phrases.split("|") for phrases in _PHRASES]
"""Sentence parts: subject, verb, place and time; a sentence takes one of each."""

MOST_PAIRS = 1000

Range = tuple[int, int]
"""Minimum and maximum, sampled uniformly."""


@dataclass(frozen=True, kw_only=True)
class Practice:
    """Options for the documents."""

    words: Range
    """Words in plain sentences per document."""
    pairs: Range
    """Pairs of key and code per document; without pairs no question follows."""
    mentions: Range
    """Mentions per pair in the text."""
    questions: Range
    """Questions at the end, each for another pair; at most as many as there are pairs."""
    kind: str = "word"
    """Code kind: ``number``, ``word`` or ``uuid``."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("words", 0), ("pairs", 0), ("mentions", 1), ("questions", 0)):
            low, high = getattr(self, name)
            if not least <= low <= high:
                raise ConfigError(f"{name}={low} {high}: expected a minimum (at least {least}) and a maximum.")
        if self.kind not in KINDS:
            raise ConfigError(f"kind={self.kind!r} is unknown. Try one of {list(KINDS)}.")
        # There are a few thousand keys, and those in a document are distinct.
        if self.pairs[1] > MOST_PAIRS:
            raise ConfigError(f"pairs={self.pairs[0]} {self.pairs[1]}: a document takes at most {MOST_PAIRS} pairs.")
        # An empty document would be one token.
        if not self.words[0] and not self.pairs[0]:
            raise ConfigError("words and pairs may both be 0, which makes an empty document. Raise either minimum.")

    def document(self, index: int) -> str:
        """Return document number ``index``, independent of the other documents."""
        context, queried_pairs = self._sample_document(index)
        if not queried_pairs:
            return context
        questions = [f"{question_of(key)} {code}." for key, code in queried_pairs]
        return f"{HEADER}{context}{''.join(questions)}"

    def conversation(self, index: int) -> list[dict[str, str]]:
        """Return the document as messages: the text with the first question, the answer, then the other questions."""
        context, queried_pairs = self._sample_document(index)
        if not queried_pairs:
            raise ConfigError(
                "a conversation needs a question, and pairs or questions may be 0. Raise both minimums to 1."
            )
        messages: list[dict[str, str]] = []
        for key, code in queried_pairs:
            question = f"What is the secret code of {key}?"
            if not messages:
                question = f"{HEADER}{context}\n\n{question}"
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": f"The secret code of {key} is {code}."})
        return messages

    def _sample_document(self, index: int) -> tuple[str, list[tuple[str, str]]]:
        """Return the text, and the pairs in its questions."""
        random = Random(f"{self.seed}/practice/{self.kind}/{index}")
        sentences = _sentences(random, _between(random, self.words))
        num_pairs = _between(random, self.pairs)
        if not num_pairs:
            return " ".join(sentences), []
        # Distinct keys and codes: every question has one answer.
        keys = distinct(random, word, num_pairs)
        pairs = list(zip(keys, distinct(random, KINDS[self.kind], num_pairs), strict=True))
        hidden = []
        for key, code in pairs:
            mentions = _between(random, self.mentions)
            hidden += [(_depth(random), needle_sentence(key, code)) for _ in range(mentions)]
        # A pair's mentions are independent: any of them answers the question.
        context, _ = insert_sentences(sentences, hidden)
        return context, random.sample(pairs, min(num_pairs, _between(random, self.questions)))


def _between(random: Random, bounds: Range) -> int:
    low, high = bounds
    return random.randint(low, high)


def _depth(random: Random) -> float:
    """Return a pair's depth, from 0 (the start of the text) to 1; each end has a probability near 1/9."""
    # An evaluation asks for both ends as often as for the depths between them. A uniform distribution would hardly ever
    # give an end.
    return min(max(random.uniform(-0.15, 1.15), 0.0), 1.0)


def _sentences(random: Random, num_words: int) -> list[str]:
    """Return sentences with at least ``num_words`` words in total: the last one may exceed that."""
    sentences: list[str] = []
    while num_words > 0:
        parts = [random.choice(phrases) for phrases in _PARTS]
        sentences.append(f"{' '.join(parts)}.")
        num_words -= sentences[-1].count(" ") + 1
    return sentences

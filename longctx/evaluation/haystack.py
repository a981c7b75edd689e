"""Text in which needles are hidden: sentences and words of documents that the model was not trained on."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import accumulate

from longctx.errors import DataError

MOST_CHARACTERS = 1 << 26
"""Characters that a haystack reads of its documents: enough for ten million tokens."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text: a cut after each full stop, question or exclamation mark before white space.

    NVIDIA's RULER cuts with nltk's Punkt model instead, which needs a download: pass ``nltk.tokenize.sent_tokenize`` to
    ``Haystack`` for its sentences.
    """
    return [sentence for sentence in _SENTENCE_END.split(text.strip()) if sentence]


class Haystack:
    """Documents as one run of sentences; all white space is a single space, as RULER has it."""

    def __init__(
        self, texts: Iterable[str], *, source: str, split: Callable[[str], list[str]] = split_sentences
    ) -> None:
        """``source`` names the texts in messages. Reading stops after ``MOST_CHARACTERS``."""
        self.source = source
        self.split = split
        self.sentences: list[str] = []
        read = 0
        for text in texts:
            # Needles stand on no line of their own, so line breaks would tell them from the text.
            text = " ".join(text.split())
            self.sentences += split(text)
            read += len(text)
            # A corpus may be far larger than any prompt.
            if read >= MOST_CHARACTERS:
                break
        if not self.sentences:
            raise DataError(f"haystack {source} holds no text. Name a folder with documents, or another one.")
        # Counted once: a window is cut for each probe of each sample.
        self._num_words = [sentence.count(" ") + 1 for sentence in self.sentences]
        self.num_words = sum(self._num_words)

    @cached_property
    def words(self) -> list[str]:
        """All words in their order."""
        return " ".join(self.sentences).split(" ")

    def window(self, first: int, num_words: int) -> list[str]:
        """``num_words`` words as sentences from number ``first`` on, around the end if need be; the last one is cut."""
        assert num_words <= self.num_words, "a window never repeats text"
        chosen: list[str] = []
        at = first % len(self.sentences)
        while num_words > 0:
            sentence = self.sentences[at]
            if self._num_words[at] > num_words:
                sentence = " ".join(sentence.split(" ")[:num_words])
            chosen.append(sentence)
            num_words -= self._num_words[at]
            # Around the end, so that a text that is just long enough serves from any sentence on.
            at = (at + 1) % len(self.sentences)
        return chosen

    def too_short(self, task: str, length: int, *, filled: int) -> DataError:
        """The error of a haystack that makes, all of it, a prompt and answer of ``filled`` tokens only."""
        return DataError(
            f"length={length}: all {self.num_words:,} words of haystack {self.source} make {filled:,} tokens with "
            f"the question and the answer of task {task}, and text is not repeated. "
            f"Give a longer haystack, or ask for length={filled * 98 // 100} or less."
        )


def insert_sentences(sentences: list[str], inserted: list[tuple[float, str]]) -> tuple[str, list[int]]:
    """The text with further sentences, and the character at which each of those begins.

    Each is inserted between two sentences, nearest to its depth (a fraction of the text's characters); of several at
    one point the one that was asked for less deep comes first.
    """
    ends = list(accumulate((len(sentence) + 1 for sentence in sentences), initial=0))
    points = [_nearest(ends, depth * ends[-1]) for depth, _ in inserted]
    # Ties by depth, so that a needle never stands before one that was asked for less deep.
    order = sorted(range(len(inserted)), key=lambda number: (points[number], inserted[number][0], number))
    parts: list[str] = []
    starts = [0] * len(inserted)
    done, length = 0, 0
    for number in order:
        before = sentences[done : points[number]]
        done = points[number]
        parts += before
        length += sum(len(part) + 1 for part in before)
        starts[number] = length
        parts.append(inserted[number][1])
        length += len(inserted[number][1]) + 1
    parts += sentences[done:]
    return " ".join(parts), starts


def _nearest(ends: list[int], wanted: float) -> int:
    """The index of the ascending ``ends`` that is nearest to a value."""
    at = bisect_left(ends, wanted, hi=len(ends) - 1)
    # The first gap that is not before the point; the one before may be nearer.
    if at and wanted - ends[at - 1] <= ends[at] - wanted:
        return at - 1
    return at

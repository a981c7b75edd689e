"""Text that hides needles: sentences and words from documents that the model was not trained on."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import accumulate

from longctx.errors import DataError

MOST_CHARACTERS = 1 << 26
"""Maximum characters read from a haystack's documents: enough for ten million tokens."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences after each full stop, question or exclamation mark before white space.

    NVIDIA's RULER uses nltk's Punkt model instead, which needs a download: pass ``nltk.tokenize.sent_tokenize`` to
    ``Haystack`` for its sentences.
    """
    return [sentence for sentence in _SENTENCE_END.split(text.strip()) if sentence]


class Haystack:
    """Documents as one sequence of sentences; all white space becomes a single space, as in RULER."""

    def __init__(
        self, texts: Iterable[str], *, source: str, split: Callable[[str], list[str]] = split_sentences
    ) -> None:
        """Read ``texts`` up to ``MOST_CHARACTERS``. ``source`` names them in messages."""
        self.source = source
        self.split = split
        self.sentences: list[str] = []
        read = 0
        for text in texts:
            # Needles are not on separate lines, so line breaks would distinguish the text from them.
            text = " ".join(text.split())
            self.sentences += split(text)
            read += len(text)
            # A corpus may be far larger than any prompt.
            if read >= MOST_CHARACTERS:
                break
        if not self.sentences:
            raise DataError(f"haystack {source} contains no text. Give a folder with documents.")
        # Count once: each probe for each sample cuts a window.
        self._num_words = [sentence.count(" ") + 1 for sentence in self.sentences]
        self.num_words = sum(self._num_words)

    @cached_property
    def words(self) -> list[str]:
        """All words in order."""
        return " ".join(self.sentences).split(" ")

    def window(self, first: int, num_words: int) -> list[str]:
        """Return ``num_words`` words as sentences from number ``first`` on; wrap around, and cut the last one."""
        assert num_words <= self.num_words, "a window never repeats text"
        chosen: list[str] = []
        at = first % len(self.sentences)
        while num_words > 0:
            sentence = self.sentences[at]
            if self._num_words[at] > num_words:
                sentence = " ".join(sentence.split(" ")[:num_words])
            chosen.append(sentence)
            num_words -= self._num_words[at]
            # Wrap around, so that a text that is just long enough works from any first sentence.
            at = (at + 1) % len(self.sentences)
        return chosen

    def too_short(self, task: str, length: int, *, filled: int) -> DataError:
        """Return the error for a haystack that fills only ``filled`` tokens of a length with prompt and answer."""
        return DataError(
            f"length={length}: haystack {self.source} has {self.num_words:,} words, which with task {task}'s question "
            f"and answer fill {filled:,} tokens, and text is not repeated. "
            f"Give a longer haystack, or try length={filled * 98 // 100} or less."
        )


def insert_sentences(sentences: list[str], inserted: list[tuple[float, str]]) -> tuple[str, list[int]]:
    """Return the text with the inserted sentences, and each one's first character.

    Each sentence goes between two others, nearest to its depth (a fraction of the text's characters); if several share
    a point, the smaller requested depth comes first.
    """
    # Character offsets between sentences, which one space separates.
    ends = list(accumulate((len(sentence) + 1 for sentence in sentences), initial=0))
    points = [_nearest(ends, depth * ends[-1]) for depth, _ in inserted]
    # Break ties by depth, so that a needle never precedes one with a smaller requested depth.
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
    """Return the index in ascending ``ends`` with the value nearest to ``wanted``."""
    at = bisect_left(ends, wanted, hi=len(ends) - 1)
    # The first gap at or after the point; the previous gap may be nearer.
    if at and wanted - ends[at - 1] <= ends[at] - wanted:
        return at - 1
    return at

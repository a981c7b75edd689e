"""Lists of pairs with a question about one of them: key-value retrieval, a phonebook, associative recall."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from longctx.evaluation.independent_samples import Draft, PromptSpec
from longctx.evaluation.random_values import distinct


@dataclass(frozen=True, kw_only=True)
class PairList:
    """Format for a list of pairs. ``units`` is the number of pairs."""

    key: Callable[[Random], str]
    value: Callable[[Random], str]
    prefix: str
    """Text before the first pair."""
    line: str
    """Format for a pair, with ``{key}`` and ``{value}``."""
    separator: str
    question: str
    """Text after the last pair, with ``{key}``; the value follows it."""
    target: str = " {value}"

    def build(self, request: PromptSpec) -> Draft:
        """Build the prompt, with the queried pair at the requested depth."""
        # Separate streams: more units add keys and values without changing the first ones.
        keys = distinct(_stream(request.random), self.key, request.units)
        values = distinct(_stream(request.random), self.value, request.units)
        # The first pair from both streams is the queried one: more pairs leave it unchanged.
        at = round(request.depth * (request.units - 1))
        pairs = list(zip(keys[1:], values[1:], strict=True))
        pairs.insert(at, (keys[0], values[0]))
        lines = [self.line.format(key=key, value=value) for key, value in pairs]
        begin = len(self.prefix) + sum(len(line) + len(self.separator) for line in lines[:at])
        # A character that occurs in no line marks the start of the value.
        begin += self.line.format(key=keys[0], value="\0").index("\0")
        return Draft(
            prompt=self.prefix + self.separator.join(lines) + self.question.format(key=keys[0]),
            answers=(values[0],),
            target=self.target.format(value=values[0]),
            spans=((begin, begin + len(values[0])),),
        )


def _stream(random: Random) -> Random:
    """Return a separate generator, so that sampling from it leaves all other values unchanged."""
    return Random(random.getrandbits(64))

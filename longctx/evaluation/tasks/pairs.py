"""Lists of pairs with a question about one of them: key-value retrieval, a phonebook, associative recall."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from longctx.evaluation.fitted import Draft, Request
from longctx.evaluation.values import distinct


@dataclass(frozen=True, kw_only=True)
class PairList:
    """Format of a list of pairs. ``units`` is the number of pairs."""

    key: Callable[[Random], str]
    value: Callable[[Random], str]
    opening: str
    """What stands before the first pair."""
    line: str
    """A pair: it names ``{key}`` and ``{value}``."""
    separator: str
    question: str
    """What stands after the last pair: it names ``{key}`` and ends where the value begins."""
    target: str = " {value}"

    def build(self, request: Request) -> Draft:
        """Build the prompt, with the pair in question at the requested depth."""
        keys = distinct(_stream(request.random), self.key, request.units)
        values = distinct(_stream(request.random), self.value, request.units)
        # The first pair of both streams is the one in question: more pairs leave it unchanged.
        at = round(request.depth * (request.units - 1))
        pairs = list(zip(keys[1:], values[1:], strict=True))
        pairs.insert(at, (keys[0], values[0]))
        lines = [self.line.format(key=key, value=value) for key, value in pairs]
        begin = len(self.opening) + sum(len(line) + len(self.separator) for line in lines[:at])
        # A character that occurs in no line marks the beginning of the value.
        begin += self.line.format(key=keys[0], value="\0").index("\0")
        return Draft(
            prompt=self.opening + self.separator.join(lines) + self.question.format(key=keys[0]),
            answers=(values[0],),
            target=self.target.format(value=values[0]),
            spans=((begin, begin + len(values[0])),),
        )


def _stream(random: Random) -> Random:
    """Return a separate generator, so that the number of draws from it changes nothing else."""
    return Random(random.getrandbits(64))

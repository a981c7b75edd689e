"""Words for RULER: the lists in the package wonderwords, and adjective-noun pairs from them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from itertools import accumulate

from longctx.errors import ConfigError

VERSION = "3.0.1"
"""Required version: another one has other words, which would change every prompt."""


def read_words(name: str) -> list[str]:
    """Read a word list from the package, such as ``nounlist.txt``; raise ConfigError without the package."""
    try:
        installed = version("wonderwords")
    except PackageNotFoundError:
        installed = "none"
    # With other words, every score would be a different measure under the same name.
    if installed != VERSION:
        raise ConfigError(
            f"RULER's words come from wonderwords {VERSION}; installed: {installed}. "
            f"Install it: pip install wonderwords=={VERSION}"
        )
    text = (files("wonderwords") / "assets" / name).read_text(encoding="utf-8")
    return [line.rstrip() for line in text.splitlines()]


@cache
def adjective_nouns() -> JoinedWords:
    """Return every adjective with every noun: six million keys for needles."""
    return JoinedWords(read_words("adjectivelist.txt"), read_words("nounlist.txt"))


@cache
def all_words() -> tuple[str, ...]:
    """Return all nouns, adjectives and verbs, unique and sorted."""
    return tuple(sorted(set(read_words("nounlist.txt") + read_words("adjectivelist.txt") + read_words("verblist.txt"))))


class JoinedWords:
    """Sequence ``sorted({f"{first}-{second}" …})`` without the list, which takes half a gigabyte and ten seconds."""

    def __init__(self, first_words: Sequence[str], seconds: Sequence[str]) -> None:
        self._seconds = sorted(set(seconds))
        self._groups: list[str | list[str]] = []
        """A first word alone, or the sorted pairs of several that are prefixes of each other."""
        # First words sort separately unless one, with its hyphen, is a prefix of another (``well`` and ``well-known``):
        # list and sort the pairs in such a group.
        for group in _group_by_prefix(sorted(f"{first}-" for first in set(first_words))):
            if len(group) == 1:
                # Its pairs are contiguous, in the order of the second words.
                self._groups.append(group[0])
            else:
                self._groups.append(sorted({first + second for first in group for second in self._seconds}))
        self._starts = list(accumulate(map(self._size, self._groups), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        # A group starts at its number of preceding pairs.
        number = bisect_right(self._starts, index) - 1
        group = self._groups[number]
        within = index - self._starts[number]
        if isinstance(group, str):
            return group + self._seconds[within]
        return group[within]

    def _size(self, group: str | list[str]) -> int:
        if isinstance(group, str):
            return len(self._seconds)
        return len(group)


def _group_by_prefix(prefixes: list[str]) -> list[list[str]]:
    """Group sorted texts so that a group's first text is a prefix of all its others."""
    groups: list[list[str]] = []
    for text in prefixes:
        if groups and text.startswith(groups[-1][0]):
            groups[-1].append(text)
        else:
            groups.append([text])
    return groups

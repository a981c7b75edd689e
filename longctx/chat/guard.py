"""Control tokens that a conversation spells stay text: they go through the template as single characters of no meaning.

``<|im_end|>`` in a user's message would else end the turn. A template cuts, trims and compares texts, which all works
on such a character as on any letter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from longctx.tokenizer.control import Span

_FIRST, _LAST = 0xF0000, 0xFFFFD
"""Characters of private use, which stand for what a conversation spells."""
_PRIVATE = f"[{chr(_FIRST)}-{chr(_LAST)}]"
_ESCAPED = re.compile(r"\\udb[89ab][0-9a-f]\\ud", re.IGNORECASE)
"""How JSON of ASCII spells such a character."""


class Restored(NamedTuple):
    """A text with what it spelt at first."""

    text: str
    plain: list[Span]
    """Where control tokens are text."""


class Guard:
    """One conversation's spellings of control tokens."""

    def __init__(self, spellings: Sequence[str]) -> None:
        longest_first = sorted(spellings, key=len, reverse=True)
        whole = [re.escape(spelling) for spelling in longest_first]
        # Texts that a template joins may spell one together: what a text ends or begins with is hidden as well.
        first = {re.escape(spelling[:stop]) for spelling in spellings for stop in range(2, len(spelling))}
        last = {re.escape(spelling[start:]) for spelling in spellings for start in range(1, len(spelling) - 1)}
        parts = [rf"(?:{_any(first)})\Z", rf"\A(?:{_any(last)})"]
        self._pattern = re.compile("|".join(whole + parts + [_PRIVATE]))
        self._spelt: list[str] = []

    def hide(self, value: Any) -> Any:
        """Return a value with every control token in its texts and keys hidden."""
        if isinstance(value, str):
            return self._pattern.sub(self._character, value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def restore(self, text: str) -> tuple[Restored, list[int]]:
        """Return the text as it was spelt, and for each hidden one the index of its character in ``text``.

        ValueError if the template has spelt one in a way that cannot be undone.
        """
        if not self._spelt:
            return Restored(text, []), []
        if _ESCAPED.search(text):
            raise ValueError("the template spells a control token of a message in ASCII")
        parts: list[str] = []
        plain: list[Span] = []
        places: list[int] = []
        at = length = 0
        for match in re.finditer(_PRIVATE, text):
            spelt = self._spelt[ord(match[0]) - _FIRST]
            length += match.start() - at
            parts += text[at : match.start()], spelt
            plain.append((length, length + len(spelt)))
            places.append(match.start())
            length += len(spelt)
            at = match.end()
        parts.append(text[at:])
        return Restored("".join(parts), plain), places

    def _character(self, match: re.Match[str]) -> str:
        if match[0] not in self._spelt:
            self._spelt.append(match[0])
        if len(self._spelt) > _LAST - _FIRST:
            raise ValueError("it spells more than 65,000 control tokens")
        return chr(_FIRST + self._spelt.index(match[0]))


def _any(parts: set[str]) -> str:
    """Return what matches the longest of these, or nothing if there are none."""
    return "|".join(sorted(parts, key=len, reverse=True)) or "(?!)"

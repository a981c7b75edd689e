"""Guard for conversations that spell control tokens: each passes through the template as one private-use character."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from longctx.tokenizer.control import Span

# Without the guard, <|im_end|> in a user's message would end the turn. Templates cut, trim and compare texts, which
# works on a private-use character as on any letter.
_FIRST, _LAST = 0xF0000, 0xFFFFD
"""Private-use characters that stand for control tokens in a conversation's text."""
_PRIVATE = f"[{chr(_FIRST)}-{chr(_LAST)}]"
_ESCAPED = re.compile(r"\\udb[89ab][0-9a-f]\\ud", re.IGNORECASE)
"""Escape sequence for such a character in ASCII JSON."""


class RestoredText(NamedTuple):
    """Text with its original spellings."""

    text: str
    plain_spans: list[Span]
    """Spans in which control tokens are plain text."""


class ControlTokenMatcher:
    """Finder for control tokens in a text, and for partial ones that an adjacent text may complete."""

    def __init__(self, token_strings: Sequence[str]) -> None:
        # Longest first, because a regex alternation takes its first match. Private-use characters in the input are
        # hidden too, so that they never pass for a placeholder.
        longest_first = sorted(token_strings, key=len, reverse=True)
        self._full = re.compile("|".join([*map(re.escape, longest_first), _PRIVATE]))
        # A partial token needs at least two characters: single ones such as "<" are too common to hide.
        self._prefixes = {token[:stop] for token in token_strings for stop in range(2, len(token))}
        self._suffixes = {token[start:] for token in token_strings for start in range(1, len(token) - 1)}
        self._longest = max(map(len, token_strings), default=0)

    def find(self, text: str) -> Iterator[Span]:
        """Yield the spans to hide, in order.

        A template may join texts into a token, so partial tokens at both ends of a text are hidden too.
        """
        at = 0
        if not self._full.match(text):
            at = next((n for n in self._lengths(len(text)) if text[:n] in self._suffixes), 0)
        if at:
            yield 0, at
        for match in self._full.finditer(text, at):
            yield match.span()
            at = match.end()
        length = len(text)
        rest = next((n for n in self._lengths(length - at) if text[length - n :] in self._prefixes), 0)
        if rest:
            yield length - rest, length

    def _lengths(self, most: int) -> range:
        """Return possible partial token lengths, descending to two characters."""
        return range(min(most, self._longest - 1), 1, -1)


class ControlTokenGuard:
    """Control tokens spelled in one conversation."""

    def __init__(self, matcher: ControlTokenMatcher) -> None:
        self._matcher = matcher
        self._hidden_strings: list[str] = []

    def hide(self, value: Any) -> Any:
        """Return a value with every control token in its texts and keys hidden."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def restore(self, text: str) -> tuple[RestoredText, list[int]]:
        """Return the text with original spellings, and each hidden span's character index in ``text``.

        Raise ValueError if the template has escaped one irreversibly.
        """
        if not self._hidden_strings:
            return RestoredText(text, []), []
        if _ESCAPED.search(text):
            raise ValueError("the template escapes a message's control token as ASCII")
        parts: list[str] = []
        plain: list[Span] = []
        hidden_offsets: list[int] = []
        at = length = 0
        for match in re.finditer(_PRIVATE, text):
            token_string = self._hidden_strings[ord(match[0]) - _FIRST]
            length += match.start() - at
            parts += text[at : match.start()], token_string
            plain.append((length, length + len(token_string)))
            hidden_offsets.append(match.start())
            length += len(token_string)
            at = match.end()
        parts.append(text[at:])
        return RestoredText("".join(parts), plain), hidden_offsets

    def _hide_text(self, text: str) -> str:
        parts: list[str] = []
        at = 0
        for start, stop in self._matcher.find(text):
            parts += text[at:start], self._placeholder(text[start:stop])
            at = stop
        parts.append(text[at:])
        return "".join(parts)

    def _placeholder(self, token_string: str) -> str:
        """Return the placeholder character for a spelling. Raise ValueError if there are too many spellings."""
        # Equal spellings share a character, so that comparisons in a template still hold.
        if token_string not in self._hidden_strings:
            self._hidden_strings.append(token_string)
        if len(self._hidden_strings) > _LAST - _FIRST:
            raise ValueError("it contains more than 65,000 control tokens")
        return chr(_FIRST + self._hidden_strings.index(token_string))

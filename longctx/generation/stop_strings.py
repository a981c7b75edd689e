"""Stop strings: a text ends before the first of them, wherever the borders of its tokens lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from longctx.errors import ConfigError
from longctx.generation.text import Decode, TextStream


class StopStrings:
    """Texts that end a continuation, and how tokens become text."""

    def __init__(self, decode: Decode, strings: Sequence[str]) -> None:
        """ConfigError for an empty string: it would end every text at once."""
        check_strings(strings)
        self._decode = decode
        self._strings = tuple(strings)

    def start(self, prompt_ids: Sequence[int]) -> Callable[[int], bool]:
        """A function from each token of a continuation to whether its text now has a stop string."""
        text, gate = TextStream(self._decode, prompt_ids), TextBeforeStop(self._strings)

        def add(token: int) -> bool:
            gate.add(text.add(token))
            return gate.has_ended

        return add


class TextBeforeStop:
    """Passes a text on until a stop string begins; what may be the beginning of one waits."""

    def __init__(self, strings: Sequence[str]) -> None:
        check_strings(strings)
        self._strings = tuple(strings)
        self._waiting = ""
        self.has_ended = False
        """Whether a stop string came; text after it is dropped."""

    def add(self, text: str) -> str:
        """What is certain to come before any stop string."""
        if self.has_ended:
            return ""
        self._waiting += text
        found = [(self._waiting.find(string), string) for string in self._strings]
        # The one that is whole first, however many characters come at once; then the one that begins first.
        whole = [(start + len(string), start) for start, string in found if start >= 0]
        if whole:
            self.has_ended = True
            certain, self._waiting = self._waiting[: min(whole)[1]], ""
            return certain
        num_held = self._num_held()
        certain = self._waiting[: len(self._waiting) - num_held]
        self._waiting = self._waiting[len(certain) :]
        return certain

    def finish(self) -> str:
        """What waited, when no more text comes."""
        rest, self._waiting = self._waiting, ""
        return rest

    def _num_held(self) -> int:
        """Characters at the end that a stop string begins with; the most of any."""
        most = 0
        for string in self._strings:
            for length in range(min(len(string) - 1, len(self._waiting)), most, -1):
                if self._waiting.endswith(string[:length]):
                    most = length
                    break
        return most


def check_strings(strings: Sequence[str]) -> None:
    """ConfigError for an empty stop string."""
    if "" in strings:
        raise ConfigError("a stop string is empty, so every text would end before it begins. Leave it out.")

"""Stop strings: a text ends before the first one, regardless of token boundaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from longctx.errors import ConfigError
from longctx.generation.detokenize import Decode, TextStream


class StopStrings:
    """Texts that end a continuation, and the function that decodes tokens."""

    def __init__(self, decode: Decode, strings: Sequence[str]) -> None:
        """Raise ConfigError for an empty string, which would end every text at once."""
        check_strings(strings)
        self._decode = decode
        self._strings = tuple(strings)

    def start(self, prompt_ids: Sequence[int]) -> Callable[[int], bool]:
        """Return a function that takes tokens in turn and returns True once their text contains a stop string."""
        text, gate = TextStream(self._decode, prompt_ids), TextBeforeStop(self._strings)

        def add(token: int) -> bool:
            gate.add(text.add(token))
            return gate.is_stopped

        return add


class TextBeforeStop:
    """Filter that passes text on until a stop string begins; a possible beginning of one is held back."""

    def __init__(self, strings: Sequence[str]) -> None:
        check_strings(strings)
        self._strings = tuple(strings)
        self._waiting = ""
        self.is_stopped = False
        """True after a stop string; later text is dropped."""

    def add(self, text: str) -> str:
        """Return the text that certainly precedes any stop string."""
        if self.is_stopped:
            return ""
        self._waiting += text
        found = [(self._waiting.find(string), string) for string in self._strings]
        # Choose the string completed first, so that the result does not depend on how many characters come at once;
        # among several, the one that begins first.
        whole = [(start + len(string), start) for start, string in found if start >= 0]
        if whole:
            self.is_stopped = True
            safe_text, self._waiting = self._waiting[: min(whole)[1]], ""
            return safe_text
        num_held = self._num_held()
        safe_text = self._waiting[: len(self._waiting) - num_held]
        self._waiting = self._waiting[len(safe_text) :]
        return safe_text

    def finish(self) -> str:
        """Return the held text, after the last input."""
        rest, self._waiting = self._waiting, ""
        return rest

    def _num_held(self) -> int:
        """Return the length of the longest suffix of the held text that is a prefix of a stop string."""
        most = 0
        for string in self._strings:
            # Longest first, and only lengths greater than the best so far.
            for length in range(min(len(string) - 1, len(self._waiting)), most, -1):
                if self._waiting.endswith(string[:length]):
                    most = length
                    break
        return most


def check_strings(strings: Sequence[str]) -> None:
    """Raise ConfigError for an empty stop string."""
    if "" in strings:
        raise ConfigError("a stop string is empty: it would stop every text at once. Leave it out.")

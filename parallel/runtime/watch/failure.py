"""``Failure``: the reason why a run ends, as ranks tell it to one another."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

FAILED, INTERRUPTED = 1, 130
"""Exit codes of a rank that died without a word, and after Ctrl-C."""
FIRST_ALIVE = -1
"""Of the ranks on each machine; not rank 0."""
_LONGEST = 16_000
"""Characters of a message that travel."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Failure of the first failing rank."""

    rank: int
    code: int
    """Exit code of every rank."""
    text: str
    """What a user reads; empty where it was said already."""
    alike: bool = False
    """Whether every rank is about to end for the same reason: then rank 0 says it, and no other rank does."""
    silent: bool = False
    """Whether the rank cannot say it itself, so that others must speak for it."""
    speaker: int | None = None
    """The rank that says it on the console, where this is the watch's message and no rank's: ``rank`` is −1 then.

    ``FIRST_ALIVE`` where rank 0 cannot.
    """
    kills: tuple[dict[str, Any], ...] = ()
    """The ``RankProcess`` of each rank that cannot end itself, for the others of its machine to end."""

    @staticmethod
    def from_values(values: dict[str, Any]) -> Failure:
        """Build it from JSON values. Raise TypeError for other values."""
        return Failure(**{**values, "kills": tuple(values.get("kills", ()))})

    def source(self) -> str:
        """Return the origin of the failure, for the log."""
        if self.speaker is None:
            return f"rank {self.rank} failed"
        return "the run was ended by its watch"

    def awaits(self, rank: int) -> bool:
        """Return whether this rank was stopped, and the others wait only for its end."""
        return any(process["rank"] == rank for process in self.kills)

    def to_values(self) -> dict[str, Any]:
        """Return the fields as JSON values; a long text loses its middle."""
        values = {**asdict(self), "kills": list(self.kills)}
        if len(self.text) > _LONGEST:
            half = _LONGEST // 2
            values["text"] = f"{self.text[:half]}\n…\n{self.text[-half:]}"
        return values


def line_of(kind: str, **values: Any) -> bytes:
    """Return a message between a rank and the hub: one line of JSON."""
    return (json.dumps({"kind": kind, **values}) + "\n").encode()


def line_of_key(key: str) -> bytes:
    """Return a rank's first line, before any message: it is compared as bytes, and a stranger's is never parsed."""
    return f"{key}\n".encode()


class Lines:
    """Messages in a stream of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that ``data`` completes. Raise ValueError for data that is not a message."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > 8 * _LONGEST:
            raise ValueError("a message without end")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("not a message")
        return messages

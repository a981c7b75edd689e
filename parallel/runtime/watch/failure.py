"""``Failure``: the reason why a run ends, as exchanged between ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

FAILED, SIGINT_CODE = 1, 130
"""Exit codes for a rank that died without a message, and after Ctrl-C."""
FIRST_ALIVE = -1
"""First running rank on each machine, except rank 0."""
_LONGEST = 16_000
"""Maximum characters per message."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Failure of the first rank that failed."""

    rank: int
    code: int
    """Exit code for every rank."""
    text: str
    """Message to the user; empty if already reported."""
    is_shared: bool = False
    """True if every rank is about to end for the same reason: then only rank 0 reports it."""
    cannot_report: bool = False
    """True if the rank cannot report it itself, so that another rank must."""
    speaker: int | None = None
    """Rank that reports it on the console if the message is from the watch instead of a rank; ``rank`` is then −1.

    ``FIRST_ALIVE`` if rank 0 cannot.
    """
    kills: tuple[dict[str, Any], ...] = ()
    """``RankProcess`` of each rank that cannot end itself; other ranks on its machine end it."""

    @staticmethod
    def from_values(values: dict[str, Any]) -> Failure:
        """Build it from JSON values. Raise TypeError for invalid values."""
        return Failure(**{**values, "kills": tuple(values.get("kills", ()))})

    def source(self) -> str:
        """Return the failure's origin, for the log."""
        if self.speaker is None:
            return f"rank {self.rank} failed"
        return "the watch ended the run"

    def awaits(self, rank: int) -> bool:
        """Return True if this rank was stopped, and the others wait only for it to end."""
        return any(process["rank"] == rank for process in self.kills)

    def to_values(self) -> dict[str, Any]:
        """Return the fields as JSON values; a long text is shortened in the middle."""
        values = {**asdict(self), "kills": list(self.kills)}
        if len(self.text) > _LONGEST:
            half = _LONGEST // 2
            values["text"] = f"{self.text[:half]}\n…\n{self.text[-half:]}"
        return values


def encode_message(kind: str, **values: Any) -> bytes:
    """Encode a message between a rank and the coordinator: one line of JSON."""
    return (json.dumps({"kind": kind, **values}) + "\n").encode()


def line_of_key(key: str) -> bytes:
    """Encode a rank's first line, before any message: compared as bytes, and never parsed."""
    return f"{key}\n".encode()


class MessageStream:
    """Messages in a byte stream."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that ``data`` completes. Raise ValueError if it is not a message."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > 8 * _LONGEST:
            raise ValueError("unterminated message, too long")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("not a message")
        return messages

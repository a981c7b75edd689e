"""Results of a rank's trace: plain values, which become JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from launcher.plan.zero import StepBytes


@dataclass(frozen=True)
class HostWait:
    """A line of code at which the host waits."""

    place: str
    """``file:line``."""
    operator: str
    why: str
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class LinkBytes:
    """Traffic of a rank over one kind of link in a step."""

    what: str
    link: str
    sent_bytes: int
    received_bytes: int
    messages: int


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """One step of one rank."""

    rank: int
    bytes: StepBytes
    peak_operator: str
    peak_place: str
    operators: int
    host_waits: list[HostWait]
    copies: int
    copied_bytes: int
    copied_to_host_bytes: int
    links: list[LinkBytes]
    is_whole: bool
    """False where the trace ended at a host wait; then its bytes are of the part before."""
    seconds: float
    most_called: list[tuple[str, int]]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        values = dataclasses.asdict(self)
        values["bytes"] |= {"held": self.bytes.held, "peak": self.bytes.peak}
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankTrace:
        """Build from the values of ``to_json``."""
        return TypeAdapter(cls).validate_python(values)

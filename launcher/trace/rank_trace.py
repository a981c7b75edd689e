"""A rank's trace results: plain values, which become JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from launcher.plan.zero_bytes import StepBytes


@dataclass(frozen=True)
class HostWait:
    """Code line at which the host waits."""

    place: str
    """``file:line``."""
    operator: str
    why: str
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class LinkBytes:
    """A rank's traffic over one kind of link in one step."""

    what: str
    link: str
    sent_bytes: int
    received_bytes: int
    messages: int


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """One rank's traced step."""

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
    """False if the trace ended at a host wait; its bytes then cover only the part before."""
    seconds: float
    most_called: list[tuple[str, int]]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        values = dataclasses.asdict(self)
        values["bytes"] |= {"held": self.bytes.held, "peak": self.bytes.peak}
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankTrace:
        """Build a trace from the values in ``to_json``."""
        return TypeAdapter(cls).validate_python(values)

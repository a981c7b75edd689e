"""What is known of a link between two ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkRate:
    """The link between two ranks, measured while both send and receive, as in a hop of the ring."""

    first: int
    second: int
    bytes_per_second: float
    """Of one direction, while the other one is as busy; of the slower direction where they differ."""
    latency_seconds: float
    """From a rank to the other one: half of the shortest round trip of eight bytes."""


@dataclass(frozen=True)
class LinkFailure:
    """A link that could not be measured."""

    first: int
    second: int
    problem: str
    """Why, on one line."""


@dataclass(frozen=True, kw_only=True)
class LinkLimits:
    """How much is sent over a link, and how long it may take."""

    smallest_bytes: int = 2**18
    """Of the first large message; the next ones are larger until one takes ``target_seconds``."""
    largest_bytes: int = 2**26
    target_seconds: float = 0.05
    """A message that takes so long is large enough."""
    seconds: float = 0.5
    """Large messages are sent again until so much time has gone, eight of them at most."""
    timeout_seconds: float = 20.0
    """For all that two ranks do together, meeting included."""

"""Results by rank count, and their growth."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

FLOORS = {"s": 0.02, "B": 4096.0, "": 8.0}
"""Values, by unit, below which growth is noise."""


@dataclass(frozen=True)
class Figure:
    """One metric of one rank, at several rank counts."""

    part: str
    case: str
    unit: str
    """``s`` (CPU seconds), ``B`` (bytes), or empty for a count."""
    needed: str
    """Necessary growth, in words."""
    power: float
    """Exponent of the rank count that these words mean for a step with the same tokens."""
    values: dict[int, float] = field(default_factory=dict)
    """Values by rank count."""
    why: str = ""
    """Reason for faster growth than necessary, if any."""

    @property
    def growth(self) -> float | None:
        """The exponent of the rank count that fits the first and the last value; None if both are too small to tell."""
        ranks = sorted(self.values)
        if len(ranks) < 2:
            return None
        floor, last = FLOORS[self.unit], self.values[ranks[-1]]
        # Shrinking values may end small, so the larger of both ends decides.
        if max(last, self.values[ranks[0]]) <= floor:
            return None
        # Clipped: a hundredth of the floor is rounding, and 0 has no logarithm.
        first, last = max(self.values[ranks[0]], floor / 100), max(last, floor / 100)
        return math.log(last / first) / math.log(ranks[-1] / ranks[0])

    @property
    def is_too_fast(self) -> bool:
        """True if it grows clearly faster than necessary."""
        return self.growth is not None and self.growth > self.power + 0.25


class Figures:
    """Results being collected: each is defined once, and given a value per rank count."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Figure] = {}

    def add(
        self,
        part: str,
        case: str,
        ranks: int,
        value: float,
        *,
        unit: str = "",
        needed: str,
        power: float,
        why: str = "",
    ) -> None:
        """Add a result's value at this rank count."""
        figure = self._found.setdefault((part, case), Figure(part, case, unit, needed, power, {}, why))
        figure.values[ranks] = value

    @property
    def all(self) -> list[Figure]:
        """Return all results in the order of their definition."""
        return list(self._found.values())


def timed(act: Callable[[], T]) -> tuple[T, float]:
    """Return ``function``'s result, and its CPU seconds."""
    started = time.process_time()
    result = act()
    return result, time.process_time() - started


def as_json(figure: Figure) -> Mapping[str, object]:
    """Return the record for the results file."""
    return {
        "part": figure.part,
        "case": figure.case,
        "unit": figure.unit,
        "needed": figure.needed,
        "power": figure.power,
        "values": {str(ranks): value for ranks, value in sorted(figure.values.items())},
        "growth": figure.growth,
        "too_fast": figure.is_too_fast,
        "why": figure.why,
    }

"""Figures by number of ranks, and how they grow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

FLOORS = {"s": 0.02, "B": 4096.0, "": 8.0}
"""By unit: what is too small to matter, and whose growth is noise."""


@dataclass(frozen=True)
class Figure:
    """One quantity of one rank, at several numbers of ranks."""

    part: str
    case: str
    unit: str
    """``s`` (CPU seconds), ``B`` (bytes), or empty for a count."""
    needed: str
    """What it must grow with, in words."""
    power: float
    """The power of the ranks that these words mean for a step of the same tokens."""
    values: dict[int, float] = field(default_factory=dict)
    """By ranks."""
    why: str = ""
    """Why it grows faster than it must, where it does."""

    @property
    def growth(self) -> float | None:
        """The power of the ranks that fits the first and the last value; None where both are too small to tell."""
        ranks = sorted(self.values)
        if len(ranks) < 2:
            return None
        floor, last = FLOORS[self.unit], self.values[ranks[-1]]
        # What shrinks may end small, so the larger of both ends decides.
        if max(last, self.values[ranks[0]]) <= floor:
            return None
        # Clipped: a hundredth of the floor is rounding, and 0 has no logarithm.
        first, last = max(self.values[ranks[0]], floor / 100), max(last, floor / 100)
        return math.log(last / first) / math.log(ranks[-1] / ranks[0])

    @property
    def is_too_fast(self) -> bool:
        """Whether it grows clearly faster than it must."""
        return self.growth is not None and self.growth > self.power + 0.25


class Figures:
    """Figures under way: each is named once, and given a value for each number of ranks."""

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
        """The value of a figure at so many ranks."""
        figure = self._found.setdefault((part, case), Figure(part, case, unit, needed, power, {}, why))
        figure.values[ranks] = value

    @property
    def all(self) -> list[Figure]:
        """In the order in which they were named."""
        return list(self._found.values())


def timed(act: Callable[[], T]) -> tuple[T, float]:
    """What it returns, and its CPU seconds."""
    started = time.process_time()
    result = act()
    return result, time.process_time() - started


def as_json(figure: Figure) -> Mapping[str, object]:
    """A figure as it is written to the results."""
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

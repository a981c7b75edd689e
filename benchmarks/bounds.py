"""Bounds on results: a benchmark defines, prints and records each bound, and fails if one does not hold."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import machine, offer_save, processor_kind, save


@dataclass(frozen=True)
class Bound:
    """A result, and its upper (or lower) limit."""

    what: str
    """The result's name; the same for all cases that have it."""
    figure: float
    limit: float
    case: str = ""
    """The table row to which it belongs."""
    why: str = ""
    """Reason for the limit, in a sentence; names any peer whose weakness makes it easier."""
    at_least: bool = False
    again: tuple[str, ...] | None = None
    """Arguments with which the benchmark measures the result a second time; None if one process is enough.

    A ratio of times differs by several percent between processes, however many rounds each of them takes.
    """
    second: float | None = None
    """Result from a second process, for a bound that the first process missed."""

    @property
    def held(self) -> bool:
        """True if the result, or its second measurement, is within the limit; never for NaN."""
        figures = [self.figure]
        if self.second is not None:
            figures.append(self.second)
        if self.at_least:
            return any(figure >= self.limit for figure in figures)
        return any(figure <= self.limit for figure in figures)

    @property
    def margin(self) -> float:
        """The result over its limit, or the inverse for a lower limit: above 1 it is outside."""
        over, under = (self.limit, self.figure) if self.at_least else (self.figure, self.limit)
        return over / under if under else float("inf")

    @property
    def figures(self) -> str:
        """Measured values, for the console."""
        second = "" if self.second is None else f", then {self.second:.4g}"
        return f"{self.figure:.4g}{second}"

    @property
    def text(self) -> str:
        """The bound without its result."""
        name = f"{self.case}: {self.what}" if self.case else self.what
        sign = "≥" if self.at_least else "≤"
        return f"{name} {sign} {self.limit:.4g}"

    def __str__(self) -> str:
        return f"{self.text}; it is {self.figures}"


def of_kind(*, plain: float, bf16: float, amx: float | None = None) -> float:
    """Return the limit for this kind of processor; ``amx`` defaults to ``bf16``."""
    return {"plain": plain, "bf16": bf16, "amx": bf16 if amx is None else amx}[processor_kind()]


def parse(parser: argparse.ArgumentParser, quick: str) -> argparse.Namespace:
    """Parse the command line with the options that all benchmarks have; ``quick`` describes what that option leaves
    out.
    """
    parser.add_argument("--quick", action="store_true", help=f"{quick}; nothing is saved")
    offer_save(parser)
    parser.add_argument("--record", type=Path, help="write the bounds to this JSON file, for python -m benchmarks")
    options = parser.parse_args()
    # As for Ctrl-C: processes that the benchmark started end with it, and temporary folders are removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(machine(), flush=True)
    return options


def conclude(
    name: str, content: dict[str, Any], bounds: Sequence[Bound], options: argparse.Namespace, *, whole: bool = True
) -> int:
    """Print the missed bounds, save results and bounds if requested, and return the benchmark's exit code.

    Results are saved with ``--save`` if the ``whole`` benchmark was run, and not with ``--quick``.
    """
    kept = [asdict(bound) | {"held": bound.held} for bound in bounds]
    if options.save and whole and not options.quick:
        print(f"saved {save(name, content | {'bounds': kept})}")
    if options.record:
        options.record.write_text(json.dumps(kept))
    missed = [bound for bound in bounds if not bound.held]
    for bound in missed:
        print(f"outside the bounds: {bound}" + (f" ({bound.why})" if bound.why else ""))
    return int(bool(missed))

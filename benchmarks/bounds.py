"""What figures may be: a benchmark states each bound, prints it, keeps it, and fails when one does not hold."""

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
    """A figure, and the most (or least) that it may be."""

    what: str
    """The figure's name; the same for all cases that have it."""
    figure: float
    limit: float
    case: str = ""
    """The row of the table that it belongs to."""
    why: str = ""
    """Where the limit comes from, in a sentence; whose weakness it profits from, if any's."""
    at_least: bool = False
    again: tuple[str, ...] | None = None
    """Arguments with which the benchmark measures the figure a second time; None where one process is enough.

    A ratio of times differs by several percent between processes, however many rounds each of them takes.
    """
    second: float | None = None
    """The figure of a second process, for a bound that the first process missed."""

    @property
    def held(self) -> bool:
        """Whether the figure, or its second measurement, is within the limit; one that is no number never is."""
        figures = [self.figure]
        if self.second is not None:
            figures.append(self.second)
        if self.at_least:
            return any(figure >= self.limit for figure in figures)
        return any(figure <= self.limit for figure in figures)

    @property
    def margin(self) -> float:
        """The figure over its limit, turned so that less is better: above 1 it is outside."""
        over, under = (self.limit, self.figure) if self.at_least else (self.figure, self.limit)
        return over / under if under else float("inf")

    @property
    def figures(self) -> str:
        """What was measured, for people."""
        second = "" if self.second is None else f", then {self.second:.4g}"
        return f"{self.figure:.4g}{second}"

    @property
    def text(self) -> str:
        """The bound without its figure."""
        name = f"{self.case}: {self.what}" if self.case else self.what
        sign = "≥" if self.at_least else "≤"
        return f"{name} {sign} {self.limit:.4g}"

    def __str__(self) -> str:
        return f"{self.text}; it is {self.figures}"


def of_kind(*, plain: float, bf16: float, amx: float | None = None) -> float:
    """The limit on this kind of processor; AMX has that of bfloat16 instructions unless it is given its own."""
    return {"plain": plain, "bf16": bf16, "amx": bf16 if amx is None else amx}[processor_kind()]


def parse(parser: argparse.ArgumentParser, quick: str) -> argparse.Namespace:
    """The command line with what all benchmarks share; ``quick`` says what that option leaves out."""
    parser.add_argument("--quick", action="store_true", help=f"{quick}; nothing is saved")
    offer_save(parser)
    parser.add_argument("--record", type=Path, help="write the bounds to this JSON file, for python -m benchmarks")
    options = parser.parse_args()
    # As Ctrl-C does: what a benchmark started ends with it, and temporary folders go.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(machine(), flush=True)
    return options


def conclude(
    name: str, content: dict[str, Any], bounds: Sequence[Bound], options: argparse.Namespace, *, whole: bool = True
) -> int:
    """Print the bounds that do not hold, save figures and bounds if asked to, and return the benchmark's exit code.

    Figures are saved with ``--save`` when the ``whole`` benchmark was run, and not with ``--quick``.
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

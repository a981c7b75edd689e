"""Tables for ``docs/scale.md``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

ATTENTION = (
    "layout of a batch",
    "schedule of a batch",
    "a layer's ring, host only",
    "peers a rank talks to",
    "keys and values a layer receives",
    "latents, were they sent, a layer receives",
    "agreement on a plan",
)
EXPERTS = ("experts", "balance by document, all-reduced", "finding shared documents", "capacity, gathered a layer")
FILES = ("checkpoint manifest", "metrics.jsonl, a step", "a step's totals, all-reduced")
START = (
    "groups that a rank makes",
    "members of its largest group",
    "making groups, no network",
    "checksums",
    "views of the data, gathered",
    "plan of a block",
)


def table_of(parts: Sequence[str]) -> Callable[[dict[str, Any]], str]:
    """Return a function that writes the table of results whose names begin with one of these."""
    return lambda result: _table([figure for figure in result["figures"] if figure["part"].startswith(tuple(parts))])


def _table(figures: Sequence[dict[str, Any]]) -> str:
    ranks = list(figures[0]["values"])
    head = ["", "of", "must grow with", *(f"{int(number):,} ranks" for number in ranks), "grows as"]
    lines = [head, ["---"] * len(head)]
    for figure in figures:
        values = [quantity(figure["values"][number], figure["unit"]) for number in ranks]
        lines.append([figure["part"], figure["case"], figure["needed"], *values, _growth(figure)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def quantity(value: float, unit: str) -> str:
    """Format a value with its unit."""
    if unit == "s":
        if value < 1:
            return f"{value * 1e3:.3g} ms"
        return f"{value:.3g} s"
    if unit == "B":
        for name, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
            if value >= size:
                return f"{value / size:.3g} {name}"
        return f"{value:.0f} B"
    return f"{value:,.0f}"


def _growth(figure: dict[str, Any]) -> str:
    """Return the fitted exponent, in bold if it is more than necessary; a dash if values are too small to tell."""
    if figure["growth"] is None:
        return "–"
    power = f"ranks^{figure['growth']:.2f}".replace("-0.00", "0.00")
    if figure["too_fast"]:
        return f"**{power}**"
    return power

"""``Figure``: one profile entry during measurement; and the profile file's text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from launcher.plan.rates import ANY, nested

_DIGITS = 4
DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes that runs use; float32 on GPUs too, if requested."""


@dataclass
class Figure:
    """Measured values, in the order of the axes' points, the last axis varying fastest."""

    name: str
    axes: Mapping[str, Sequence[float]]
    what: str
    """Measurement description, for ``source``."""
    values: dict[str, list[float]] = field(default_factory=dict)
    """Keyed by dtype, or ``ANY``."""

    @classmethod
    def of(cls, name: str, value: float, what: str) -> Figure:
        """Build an entry with one value."""
        return cls(name, {}, what, {ANY: [value]})

    def add(self, dtype: torch.dtype | None, value: float) -> None:
        """Append a dtype's next value; None stands for all dtypes."""
        key = ANY
        if dtype is not None:
            key = str(dtype).removeprefix("torch.")
        self.values.setdefault(key, []).append(value)

    def section(self, source: str) -> str:
        """Format the entry as a TOML section."""
        lines = [f"[{self.name}]"]
        lines += [f"{name} = {json.dumps(list(points))}" for name, points in self.axes.items()]
        shape = [len(points) for points in self.axes.values()]
        for dtype, values in self.values.items():
            lines.append(f"{dtype} = {_text(nested([_rounded(value) for value in values], shape))}")
        lines.append(f"source = {json.dumps(source, ensure_ascii=False)}")
        return "\n".join(lines) + "\n"


def mean_over_ranks(figures: Sequence[Figure]) -> Figure:
    """Average one entry over ranks."""
    # Harmonic mean of rates: each rank has the same number of units, so seconds per unit are averaged.
    first = figures[0]
    # All ranks have the same points: sizes depend only on the device.
    values = {}
    for dtype in first.values:
        columns = zip(*(figure.values[dtype] for figure in figures), strict=True)
        values[dtype] = [_harmonic(column) for column in columns]
    return Figure(first.name, first.axes, first.what, values)


def profile_text(name: str, device_type: str, figures: Sequence[Figure], when: str, notes: Sequence[str]) -> str:
    """Format the complete profile file."""
    head = [f"# {line}" for line in notes]
    head += [f"name = {json.dumps(name, ensure_ascii=False)}", f'device_type = "{device_type}"', ""]
    return "\n".join(head) + "\n" + "\n".join(figure.section(f"{figure.what}; {when}") for figure in figures)


def _harmonic(values: Sequence[float]) -> float:
    # A value may be 0: the peak is unknown, or no time is hidden.
    if not all(values):
        return 0.0
    return len(values) / sum(1 / value for value in values)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _text(values: Any) -> str:
    """Format numbers as TOML, one line per table row."""
    if isinstance(values, list) and values and isinstance(values[0], list):
        return "[\n" + "".join(f"  {_text(row)},\n" for row in values) + "]"
    if isinstance(values, list):
        return "[" + ", ".join(map(_text, values)) + "]"
    text = f"{values:.{_DIGITS}g}"
    # TOML distinguishes integers from floats.
    if "." not in text and "e" not in text:
        text += ".0"
    return text

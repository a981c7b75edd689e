"""``ProfileEntry``: one profile entry during measurement; and the profile file's text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from launcher.plan.rates import ANY, nested

_PRECISION = 4
DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes that runs use; float32 on GPUs too, if requested."""


@dataclass
class ProfileEntry:
    """Measured values, in the order of the axes' points, the last axis varying fastest."""

    name: str
    axes: Mapping[str, Sequence[float]]
    description: str
    """Measurement description, for ``source``."""
    values: dict[str, list[float]] = field(default_factory=dict)
    """Keyed by dtype, or ``ANY``."""

    @classmethod
    def of(cls, name: str, value: float, description: str) -> ProfileEntry:
        """Build an entry with one value."""
        return cls(name, {}, description, {ANY: [value]})

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


def mean_over_ranks(entries: Sequence[ProfileEntry]) -> ProfileEntry:
    """Average one entry over ranks."""
    # Harmonic mean of rates: each rank has the same number of units, so seconds per unit are averaged.
    first = entries[0]
    # All ranks have the same points: sizes depend only on the device.
    values = {}
    for dtype in first.values:
        columns = zip(*(entry.values[dtype] for entry in entries), strict=True)
        values[dtype] = [_harmonic(column) for column in columns]
    return ProfileEntry(first.name, first.axes, first.description, values)


def profile_text(
    name: str, device_type: str, entries: Sequence[ProfileEntry], suffix: str, notes: Sequence[str]
) -> str:
    """Format the complete profile file."""
    head = [f"# {line}" for line in notes]
    head += [f"name = {json.dumps(name, ensure_ascii=False)}", f'device_type = "{device_type}"', ""]
    return "\n".join(head) + "\n" + "\n".join(entry.section(f"{entry.description}; {suffix}") for entry in entries)


def _harmonic(values: Sequence[float]) -> float:
    # A value may be 0: the peak is unknown, or no time is hidden.
    if not all(values):
        return 0.0
    return len(values) / sum(1 / value for value in values)


def _rounded(value: float) -> float:
    return float(f"{value:.{_PRECISION}g}")


def _text(values: Any) -> str:
    """Format numbers as TOML, one line per table row."""
    if isinstance(values, list) and values and isinstance(values[0], list):
        return "[\n" + "".join(f"  {_text(row)},\n" for row in values) + "]"
    if isinstance(values, list):
        return "[" + ", ".join(map(_text, values)) + "]"
    text = f"{values:.{_PRECISION}g}"
    # TOML distinguishes integers from floats.
    if "." not in text and "e" not in text:
        text += ".0"
    return text

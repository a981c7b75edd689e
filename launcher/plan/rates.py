"""``Rate``: a device's work per second, which may depend on sizes and on the dtype.

A small table by size, interpolated in the logarithms of sizes and rate, and constant beyond its borders.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

DTYPES = ("float32", "bfloat16")
ANY = "value"
"""Key for all dtypes."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Work per second, constant or by dtype and sizes."""

    values: Mapping[str, tuple[float, ...]]
    """By dtype, or ``ANY`` for all: a value for each grid point, the last axis varying fastest."""
    axes: Mapping[str, tuple[float, ...]]
    """Grid points by size name, ascending; empty if the rate is the same for all sizes."""

    @classmethod
    def plain(cls, value: float) -> Rate:
        """Build a rate with one value for all dtypes and sizes."""
        return cls(values={ANY: (value,)}, axes={})

    @property
    def is_plain(self) -> bool:
        """True if the rate depends on neither sizes nor dtype."""
        return not self.axes and ANY in self.values

    def at(self, dtype: str = ANY, **sizes: float) -> float:
        """Return the rate for these sizes; ignore sizes that it does not depend on."""
        values = self.values.get(dtype)
        if values is None:
            values = self.values.get(ANY) or next(iter(self.values.values()))
        if not self.axes:
            # Fast path: a search calls this a million times.
            return values[0]
        # Multilinear interpolation: two points with weights per axis; a corner's weight is their product.
        intervals = [_place(points, sizes[name]) for name, points in self.axes.items()]
        # Average logarithms: half way between 1 and 4 is 2.
        total = 0.0
        for vertex in product((0, 1), repeat=len(intervals)):
            weight, index = 1.0, 0
            for end, (low, share), points in zip(vertex, intervals, self.axes.values(), strict=True):
                weight *= share if end else 1 - share
                index = index * len(points) + min(low + end, len(points) - 1)
            if weight:
                total += weight * math.log(values[index])
        return math.exp(total)

    def to_json(self) -> Any:
        """Return a number, or tables as plain values."""
        if self.is_plain:
            return self.values[ANY][0]
        return {name: list(points) for name, points in self.axes.items()} | {
            dtype: nested(values, [len(points) for points in self.axes.values()])
            for dtype, values in self.values.items()
        }


def _place(points: Sequence[float], size: float) -> tuple[int, float]:
    """Return the index of the point below a size, and the fraction to the next point, 0 to 1, in logarithms."""
    if size <= points[0]:
        return 0, 0.0
    if size >= points[-1]:
        return len(points) - 1, 0.0
    low = bisect_right(points, size) - 1
    return low, math.log(size / points[low]) / math.log(points[low + 1] / points[low])


def nested(values: Sequence[float], shape: Sequence[int]) -> Any:
    """Return flat values as nested lists of this shape; a number if the shape is empty."""
    if not shape:
        return values[0]
    if len(shape) == 1:
        return list(values)
    step = len(values) // shape[0]
    return [nested(values[start : start + step], shape[1:]) for start in range(0, len(values), step)]


def read_rate(given: Mapping[str, Any], axes: Sequence[str]) -> Rate | str:
    """Parse a rate from a profile's section, or return an error message. ``axes`` are the sizes it may contain."""
    points: dict[str, tuple[float, ...]] = {}
    for name in axes:
        if name in given:
            found = _ascending(given[name])
            if found is None:
                return f"{name} = {given[name]!r} is not an ascending list of sizes above 0"
            points[name] = found
    # Require both dtypes, or one value for all: a run in the other dtype must not use this one's rate by accident.
    tables = {name: given[name] for name in (ANY, *DTYPES) if name in given}
    if set(tables) not in ({ANY}, set(DTYPES)):
        return "it must have either a value, or one for float32 and one for bfloat16"
    unknown = sorted(set(given) - set(points) - set(tables) - {"source"})
    if unknown:
        return f"{', '.join(unknown)} is not allowed here"
    shape, values = [len(of_axis) for of_axis in points.values()], {}
    for name, table in tables.items():
        flat = _flat(table, shape)
        if flat is None:
            wanted = "a number above 0"
            if shape:
                wanted = f"{' lists of '.join(map(str, shape))} numbers above 0, one for each size"
            return f"{name} = {str(table)[:60]} is not {wanted}"
        values[name] = flat
    return Rate(values=values, axes=points)


def is_amount(value: Any) -> bool:
    """Return True if the value is a finite number above 0."""
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value < math.inf


def _ascending(values: Any) -> tuple[float, ...] | None:
    if not isinstance(values, list) or not values or not all(map(is_amount, values)):
        return None
    if any(current <= previous for previous, current in pairwise(values)):
        return None
    return tuple(map(float, values))


def _flat(table: Any, shape: Sequence[int]) -> tuple[float, ...] | None:
    """Flatten nested lists with this shape; return None if the shape does not match."""
    if not shape:
        if not is_amount(table):
            return None
        return (float(table),)
    if not isinstance(table, list) or len(table) != shape[0]:
        return None
    found: list[float] = []
    for part in table:
        flat = _flat(part, shape[1:])
        if flat is None:
            return None
        found.extend(flat)
    return tuple(found)

"""Ranges of rows: union, locate."""

from __future__ import annotations

from collections.abc import Sequence

Ranges = tuple[tuple[int, int], ...]
"""Half-open [start, stop) ranges of rows, ascending and disjoint."""


def num_rows(ranges: Ranges) -> int:
    """Rows that the ranges hold."""
    return sum(stop - start for start, stop in ranges)


def union(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Ascending disjoint ranges that cover the same rows."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def locate(rows: Ranges, within: Ranges) -> Ranges:
    """Where rows lie among the packed rows of ``within``, which hold them all."""
    found, at, packed = [], 0, 0
    for start, stop in rows:
        while not within[at][0] <= start < within[at][1]:
            packed += within[at][1] - within[at][0]
            at += 1
        shift = packed - within[at][0]
        found.append((start + shift, stop + shift))
    return tuple(found)

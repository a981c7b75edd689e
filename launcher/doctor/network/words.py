"""How hosts are named in findings of the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.wording import first_names

MOST_NAMED = 4
"""Pairs or hosts that a line names."""


def names_of(names: Sequence[str]) -> str:
    """``a, b``, or ``a, b, c, d and 12 more``."""
    return first_names(list(names), MOST_NAMED)


def by_value(values: Mapping[str, str]) -> str:
    """``eth0 on all 3 hosts``, where they have the same; else ``eth0 on a, b; ib0 on c``."""
    different = list(dict.fromkeys(values.values()))
    if len(values) == 1:
        return different[0]
    if len(different) == 1:
        return f"{different[0]} on all {len(values)} hosts"
    return "; ".join(f"{value} on {names_of([n for n in values if values[n] == value])}" for value in different)

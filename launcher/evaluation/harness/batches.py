"""Which requests are worked on together: those of one context, those that fit one forward pass, those of one rank."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from longctx.generation.scoring import Pair


def by_context(pairs: Sequence[Pair]) -> list[list[int]]:
    """The indices of pairs with the same context; the longest group first, so that what does not fit fails early."""
    groups: dict[bytes, list[int]] = {}
    for index, pair in enumerate(pairs):
        groups.setdefault(compact(pair.context).tobytes(), []).append(index)
    # Sorting is stable: every rank has the same order.
    return sorted(groups.values(), key=lambda group: -max(pairs[index].num_read for index in group))


def compact(ids: Sequence[int]) -> array[int]:
    """The ids in four bytes each: hundreds of long texts wait at once."""
    return array("i", ids)


def packs(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Neighbouring indices whose lengths are together at most ``limit``; a longer one is alone."""
    found: list[list[int]] = []
    # As if a full one stood before the first.
    used = limit
    for index, length in enumerate(lengths):
        if used + length > limit:
            found.append([])
            used = 0
        found[-1].append(index)
        used += length
    return found


def deal_by_cost(costs: Sequence[int], degree: int) -> list[list[int]]:
    """Indices for each of ``degree`` ranks, about even in cost: the next costliest to whoever has least."""
    shares: list[list[int]] = [[] for _ in range(degree)]
    totals = [0] * degree
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        rank = totals.index(min(totals))
        shares[rank].append(index)
        totals[rank] += costs[index]
    return shares


def portions(costs: Sequence[int], limit: int) -> Iterator[range]:
    """Yield ranges of neighbours that cost about ``limit`` together, at least one each."""
    start, total = 0, 0
    for index, cost in enumerate(costs):
        if index > start and total + cost > limit:
            yield range(start, index)
            start, total = index, 0
        total += cost
    if costs:
        yield range(start, len(costs))

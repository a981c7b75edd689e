"""Request grouping by context, by forward pass and by rank."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from longctx.generation.scoring import Pair


def by_context(pairs: Sequence[Pair]) -> list[list[int]]:
    """Group pair indices by context, longest group first, so that memory errors come early."""
    groups: dict[bytes, list[int]] = {}
    for index, pair in enumerate(pairs):
        groups.setdefault(compact(pair.context).tobytes(), []).append(index)
    # Sorting is stable, so every rank has the same order.
    return sorted(groups.values(), key=lambda group: -max(pairs[index].num_read for index in group))


def compact(ids: Sequence[int]) -> array[int]:
    """Return the ids in four bytes each: hundreds of long texts wait at once."""
    return array("i", ids)


def packs(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Group neighbouring indices up to a total length of ``limit``; a longer item forms its own group."""
    found: list[list[int]] = []
    # Start as if a full group came before.
    used = limit
    for index, length in enumerate(lengths):
        if used + length > limit:
            found.append([])
            used = 0
        found[-1].append(index)
        used += length
    return found


def assign_by_cost(costs: Sequence[int], degree: int) -> list[list[int]]:
    """Assign indices to ``degree`` ranks at about equal cost."""
    shares: list[list[int]] = [[] for _ in range(degree)]
    # Greedy longest-first: the costliest remaining item goes to the rank with the lowest total.
    totals = [0] * degree
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        rank = totals.index(min(totals))
        shares[rank].append(index)
        totals[rank] += costs[index]
    return shares


def portions(costs: Sequence[int], limit: int) -> Iterator[range]:
    """Yield neighbouring ranges with a total cost of about ``limit``, each with at least one item."""
    start, total = 0, 0
    for index, cost in enumerate(costs):
        # Never yield an empty range, even if a single item exceeds the limit.
        if index > start and total + cost > limit:
            yield range(start, index)
            start, total = index, 0
        total += cost
    if costs:
        yield range(start, len(costs))

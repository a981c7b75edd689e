"""Which links are much slower than the others, by a rule that a slow host does not hide from.

**The rule.** Of each rank the best of its links counts. The upper median of these over the ranks is what a good link
does here. A link is slow where it has less than half of that bandwidth, or more than four times that latency and 0.2 ms
more. Where all links of a rank are slow, and there are several, the rank is named in place of its links.

The median over links would not do: where one of three hosts is slow, two of three links are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_high, median_low
from typing import Literal

from parallel.comm.links.rates import LinkRate

SLOW_RATIO = 2.0
"""A link with less than this part of the usual bandwidth is slow."""
LATE_RATIO = 4.0
LATE_SECONDS = 2e-4
"""A latency is high where it is so many times the usual one, and by so much longer: small ones scatter."""

Quantity = Literal["bandwidth", "latency"]


@dataclass(frozen=True)
class Outlier:
    """A link that is slow, or a rank of which all links are."""

    quantity: Quantity
    ranks: tuple[int, ...]
    """Two: the link between them. One: all links of this rank."""
    value: float
    """Bytes a second, or seconds; of a rank its best link's."""
    usual: float
    """What a good link has here."""

    @property
    def ratio(self) -> float:
        """How many times worse than usual."""
        if self.quantity == "latency":
            return self.value / self.usual
        return self.usual / self.value


def find_outliers(rates: Sequence[LinkRate]) -> list[Outlier]:
    """Links and ranks that are slow by this module's rule; the worst first. Two ranks have nothing to compare with."""
    found = [*_slow_bandwidths(rates), *_high_latencies(rates)]
    return sorted(found, key=lambda outlier: -outlier.ratio)


def _slow_bandwidths(rates: Sequence[LinkRate]) -> list[Outlier]:
    best = _best(rates, lambda rate: rate.bytes_per_second, max)
    if not best:
        return []
    usual = median_high(best.values())
    slow = {(r.first, r.second): r.bytes_per_second for r in rates if r.bytes_per_second * SLOW_RATIO < usual}
    return _named("bandwidth", slow, rates, usual, max)


def _high_latencies(rates: Sequence[LinkRate]) -> list[Outlier]:
    best = _best(rates, lambda rate: rate.latency_seconds, min)
    if not best:
        return []
    usual = median_low(best.values())
    bound = max(usual * LATE_RATIO, usual + LATE_SECONDS)
    late = {(r.first, r.second): r.latency_seconds for r in rates if r.latency_seconds > bound}
    return _named("latency", late, rates, usual, min)


def _best(
    rates: Sequence[LinkRate], value: Callable[[LinkRate], float], better: Callable[[float, float], float]
) -> dict[int, float]:
    """The best value of each rank's links."""
    best: dict[int, float] = {}
    for rate in rates:
        for rank in (rate.first, rate.second):
            best[rank] = better(best.get(rank, value(rate)), value(rate))
    return best


def _named(
    quantity: Quantity,
    slow: dict[tuple[int, int], float],
    rates: Sequence[LinkRate],
    usual: float,
    better: Callable[[Iterable[float]], float],
) -> list[Outlier]:
    """The slow ranks, and the slow links that are of no slow rank."""
    links_of: dict[int, list[tuple[int, int]]] = {}
    for rate in rates:
        for rank in (rate.first, rate.second):
            links_of.setdefault(rank, []).append((rate.first, rate.second))
    slow_ranks = [rank for rank, links in links_of.items() if len(links) > 1 and all(link in slow for link in links)]
    found = [
        Outlier(quantity, (rank,), better(slow[link] for link in links_of[rank]), usual) for rank in sorted(slow_ranks)
    ]
    for link, value in slow.items():
        if not any(rank in slow_ranks for rank in link):
            found.append(Outlier(quantity, link, value, usual))
    return found

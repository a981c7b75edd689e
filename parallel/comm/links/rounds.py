"""Which pairs of ranks are measured at the same time: a tournament, so that no rank is in two pairs at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

Pair = tuple[int, int]
Round = tuple[Pair, ...]

MOST_ROUNDS = 16
"""Rounds of a larger tournament are a sample: each rank then meets so many others, not all of them."""


def rounds_of(ranks: Sequence[int], *, most_rounds: int = MOST_ROUNDS) -> list[Round]:
    """Every pair of ``ranks`` once, in rounds in which a rank is in one pair at most; the smaller rank stands first.

    With more than ``most_rounds`` rounds, so many of them, evenly spaced: each rank is in all of these (but one where
    ranks are odd).
    """
    places: list[int | None] = list(ranks)
    if len(places) < 2:
        return []
    if len(places) % 2:
        # Who meets nobody has a rest.
        places.append(None)
    rounds = []
    for _ in range(len(places) - 1):
        opposite = zip(places[: len(places) // 2], reversed(places), strict=False)
        rounds.append(tuple((min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None))
        # The circle method: the first one stays, all others move on by a place.
        places = [places[0], places[-1], *places[1:-1]]
    return _sample(rounds, most_rounds)


def rounds_of_hosts(hosts: Sequence[Hashable], *, most_rounds: int = MOST_ROUNDS) -> list[Round]:
    """The rounds of a world whose rank n is on host ``hosts[n]``: pairs within each host, then pairs between hosts.

    Within hosts all of them are measured at the same time. Between hosts the first rank of each host stands for it.
    """
    ranks_of: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    tournaments = [rounds_of(ranks, most_rounds=most_rounds) for ranks in ranks_of.values()]
    within: list[Round] = []
    for number in range(max(map(len, tournaments), default=0)):
        played = [tournament[number] for tournament in tournaments if number < len(tournament)]
        within.append(tuple(pair for each in played for pair in each))
    return within + rounds_of([ranks[0] for ranks in ranks_of.values()], most_rounds=most_rounds)


def pair_of(rank: int, pairs: Round) -> Pair | None:
    """The pair that a rank is in; None where it has a rest."""
    for pair in pairs:
        if rank in pair:
            return pair
    return None


def _sample(rounds: list[Round], most: int) -> list[Round]:
    """At most ``most`` of the rounds, evenly spaced."""
    if len(rounds) <= most:
        return rounds
    return [rounds[index * len(rounds) // most] for index in range(most)]

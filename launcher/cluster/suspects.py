"""The event of a number that was wrong, and whose it was: what the run writes and its supervisor reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

AUDIT_EVENT = "audit"
"""The event of an audit that found a wrong number (``run.audit_every``)."""


def suspected_ranks(record: Mapping[str, Any]) -> list[int]:
    """The ranks that an audit's event names with certainty; none of a finding that leaves it open."""
    named = [finding["ranks"][0] for finding in record["findings"] if len(finding["ranks"]) == 1]
    return sorted(set(named))


def hosts_of(ranks: Sequence[int], slots: Mapping[str, int], world_size: int) -> list[str]:
    """The hosts of these ranks by a hostfile's ``slots``; of a run without one, or on other hosts, "this machine".

    Ranks are counted through the hosts, slot by slot.
    """
    if ranks and sum(slots.values()) != world_size:
        return ["this machine"]
    places = [host for host, count in slots.items() for _ in range(count)]
    return list(dict.fromkeys(places[rank] for rank in ranks))

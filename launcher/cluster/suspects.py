"""The event of a number that was wrong, and whose it was: what the run writes and its supervisor reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AUDIT_EVENT = "audit"
"""The event of an audit that found a wrong number (``run.audit_every``)."""


def suspected_ranks(record: Mapping[str, Any]) -> list[int]:
    """The ranks that an audit's event names with certainty; none of a finding that leaves it open."""
    named = [finding["ranks"][0] for finding in record["findings"] if len(finding["ranks"]) == 1]
    return sorted(set(named))


def host_of_rank(slots: Mapping[str, int], rank: int) -> str | None:
    """The host of a rank: ranks are counted through the hosts of a hostfile, slot by slot. None beyond the last."""
    for host, count in slots.items():
        if rank < count:
            return host
        rank -= count
    return None

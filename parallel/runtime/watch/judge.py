"""Judgement whether a run hangs, and because of which ranks: pure arithmetic on the states that ranks report.

**The rule.** With L nine tenths of ``run.timeout_seconds`` a run hangs

1. when a rank was not heard of for L: its process is stopped, its machine is gone, or a call into a library holds
   Python's lock;
2. when a rank has waited for L in a collective that has a time-out: that would end by itself a little later, with
   a message that names no rank;
3. when no rank has made progress for L. Waiting is no progress; a mark of the work is, and if a rank does not wait,
   so is any sign from outside that it works (``sample.py``).

So a rank may build, compile, hash, save or evaluate for hours while all others wait patiently, as long as it does
anything at all. During one call to a file system no sign of that is seen: a rank that has marked work on a disk may be
quiet for ``DISK`` times as long. A process that was stopped for less than L goes on unharmed, and so does the run.

**The cause.** The ranks that were not heard of; otherwise those that do not wait while others do; otherwise, if all of
them wait, those that are behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WORKS, TIMED, PATIENT = "works", "waits", "waits patiently"
"""What a main thread does: no waiting; waiting in a collective that has a time-out; waiting in one that has a day."""
SHARE = 0.9
"""Of ``run.timeout_seconds``: the verdict comes before that of a library."""
DISK = 6.0
LATE = 0.25
"""Of ``run.timeout_seconds``: the rank that others have waited for so long is named in a warning."""


@dataclass(frozen=True, kw_only=True)
class RankState:
    """State that a rank reports."""

    what: str
    step: int
    count: int
    """Marks that its work has left: progress, in a number."""
    kind: str
    """``WORKS``, ``TIMED`` or ``PATIENT``."""
    held: float
    """Seconds since its last mark."""
    waited: float
    """Seconds of its present wait; 0 where it does not wait."""
    quiet: float
    """Seconds since it made progress."""
    disk: bool = False
    """Whether it may be in a call to a file system."""
    silent: float = 0.0
    """Seconds since it was heard of."""


@dataclass(frozen=True)
class Hang:
    """Ranks because of which a run hangs, and the reason."""

    ranks: tuple[int, ...]
    """Whom the others wait for; all of them where they wait for one another."""
    reason: str


def judge(states: Mapping[int, RankState], limit: float) -> Hang | None:
    """Return the hang if the run hangs, otherwise None; ``limit`` is L, in seconds."""
    # Silence first: whatever others wait for, the cause is a rank that can send nothing.
    silent = tuple(rank for rank, state in states.items() if state.silent >= limit)
    if silent:
        seconds = max(states[rank].silent for rank in silent)
        return Hang(silent, f"not heard of for {seconds:.1f} s")
    # As reported, without the time since: a rank that has not reported since may have gone on.
    waits = [state.waited for state in states.values() if state.kind == TIMED]
    if max(waits, default=0.0) >= limit:
        return _hang(states, f"others have waited {max(waits):.1f} s for {{}}")
    if states and all(_is_quiet(state, limit) for state in states.values()):
        quiet = min(state.quiet for state in states.values())
        return _hang(states, f"no rank has made progress for {quiet:.1f} s, for want of {{}}")
    return None


def late(states: Mapping[int, RankState], after: float) -> tuple[int, ...]:
    """Return the ranks that all others waited for, or that were silent, for so many seconds; mostly none."""
    silent = tuple(rank for rank, state in states.items() if state.silent >= after)
    waits = [state.waited for state in states.values() if state.kind != WORKS]
    working = tuple(rank for rank, state in states.items() if state.kind == WORKS)
    # If many work, as in a part without collectives, a few that are done early wait for no rank in particular.
    if silent or not waits or max(waits) < after or len(working) > max(1, len(states) // 8):
        return silent
    return working


def _is_quiet(state: RankState, limit: float) -> bool:
    """Return whether it made no progress for too long."""
    if state.disk and state.kind == WORKS:
        limit *= DISK
    return state.quiet >= limit


def _hang(states: Mapping[int, RankState], reason: str) -> Hang:
    """Return the hang that is due to the ranks that the others wait for."""
    working = [rank for rank, state in states.items() if state.kind == WORKS]
    if working:
        # Ranks that wait tell nothing, those that work are slow or stuck: the quietest, if there are both.
        stuck = [rank for rank in working if states[rank].quiet >= max(states[r].quiet for r in working) / 2]
        return Hang(tuple(stuck), reason.format(plural(stuck)))
    # Of ranks that enter the same collectives in the same order, the one that others wait for has entered the fewest.
    behind = min((state.step, state.count) for state in states.values())
    last = [rank for rank, state in states.items() if (state.step, state.count) == behind]
    if len(last) == len(states):
        return Hang(tuple(last), "all ranks wait for one another")
    return Hang(tuple(last), f"all ranks wait, and {plural(last)} is furthest behind")


def plural(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 3, 5, 6"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:8])
    if len(ranks) > 8:
        shown += f" and {len(ranks) - 8} more"
    return f"ranks {shown}"

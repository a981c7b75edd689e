"""Decision whether a run hangs, and because of which ranks: pure arithmetic on reported states.

**Rule.** With L = nine tenths of ``run.timeout_seconds``, a run hangs

1. if a rank has been silent for L: its process is stopped, its machine is gone, or a library call holds Python's lock;
2. if a rank has waited for L in a collective with a timeout: that would end by itself soon, with a message that
   names no rank;
3. if no rank has made progress for L. Waiting is not progress; a mark is, and if a rank does not wait, so is any
   external evidence of work (``activity_sampler.py``).

So a rank may build, compile, hash, save or evaluate for hours while all others wait patiently, as long as it shows any
activity. During a single file system call there is no such evidence: a rank that has marked disk work may be quiet for
``DISK`` times as long. If a process is stopped for less than L, it and the run continue unharmed.

**Cause.** The silent ranks; otherwise those that do not wait while others do; otherwise, if all wait, those that are
furthest behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WORKS, TIMED, PATIENT = "works", "waits", "waits patiently"
"""Main thread states: not waiting; waiting in a collective with a timeout; waiting in one with a one-day timeout."""
SHARE = 0.9
"""Fraction of ``run.timeout_seconds``: the watch decides before a library's timeout."""
DISK = 6.0
WARN_SHARE = 0.25
"""Fraction of ``run.timeout_seconds`` after which a warning names the rank that others wait for."""


@dataclass(frozen=True, kw_only=True)
class RankState:
    """State reported by a rank."""

    activity: str
    step: int
    count: int
    """Number of marks left so far: its progress."""
    kind: str
    """``WORKS``, ``TIMED`` or ``PATIENT``."""
    held: float
    """Seconds since its last mark."""
    waited: float
    """Seconds in the current wait; 0 if it does not wait."""
    quiet: float
    """Seconds since it made progress."""
    disk: bool = False
    """True if it may be in a file system call."""
    silence: float = 0.0
    """Seconds since its last message."""


@dataclass(frozen=True)
class Stall:
    """Ranks that make a run hang, and the reason."""

    ranks: tuple[int, ...]
    """Ranks that the others wait for; all ranks if they wait for one another."""
    reason: str


def detect_stall(states: Mapping[int, RankState], limit: float) -> Stall | None:
    """Return the hang if the run hangs, otherwise None; ``limit`` is L, in seconds."""
    # Silence first: whatever others wait for, the cause is a rank that cannot send.
    missing_ranks = tuple(rank for rank, state in states.items() if state.silence >= limit)
    if missing_ranks:
        seconds = max(states[rank].silence for rank in missing_ranks)
        return Stall(missing_ranks, f"no heartbeat for {seconds:.1f} s")
    # As reported, without the time since: a rank may have continued since its last report.
    waits = [state.waited for state in states.values() if state.kind == TIMED]
    if max(waits, default=0.0) >= limit:
        return _stall(states, f"others have waited {max(waits):.1f} s for {{}}")
    if states and all(_is_quiet(state, limit) for state in states.values()):
        quiet = min(state.quiet for state in states.values())
        return _stall(states, f"no rank has made progress for {quiet:.1f} s, waiting for {{}}")
    return None


def slow_ranks(states: Mapping[int, RankState], after: float) -> tuple[int, ...]:
    """Return the ranks that all others waited for, or that were silent, for ``after`` seconds; usually empty."""
    missing_ranks = tuple(rank for rank, state in states.items() if state.silence >= after)
    waits = [state.waited for state in states.values() if state.kind != WORKS]
    working = tuple(rank for rank, state in states.items() if state.kind == WORKS)
    # If many ranks work, as in a phase without collectives, a few early finishers wait for no rank in particular.
    if missing_ranks or not waits or max(waits) < after or len(working) > max(1, len(states) // 8):
        return missing_ranks
    return working


def _is_quiet(state: RankState, limit: float) -> bool:
    """Return True if the rank made no progress for too long."""
    if state.disk and state.kind == WORKS:
        limit *= DISK
    return state.quiet >= limit


def _stall(states: Mapping[int, RankState], reason: str) -> Stall:
    """Attribute the hang to the ranks that the others wait for."""
    working = [rank for rank, state in states.items() if state.kind == WORKS]
    if working:
        # Waiting ranks give no hint; working ranks are slow or stuck: choose the quietest.
        stuck = [rank for rank in working if states[rank].quiet >= max(states[r].quiet for r in working) / 2]
        return Stall(tuple(stuck), reason.format(format_ranks(stuck)))
    # All ranks enter the same collectives in the same order, so the one that others wait for has entered the fewest.
    least_progress = min((state.step, state.count) for state in states.values())
    last = [rank for rank, state in states.items() if (state.step, state.count) == least_progress]
    if len(last) == len(states):
        return Stall(tuple(last), "all ranks wait for one another")
    return Stall(tuple(last), f"all ranks wait, and {format_ranks(last)} is furthest behind")


def format_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 3, 5, 6"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:8])
    if len(ranks) > 8:
        shown += f" and {len(ranks) - 8} more"
    return f"ranks {shown}"

"""Message about a hanging run: cause, reason, and each rank's activity, on one screen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from parallel.runtime.watch.processes import RankProcess
from parallel.runtime.watch.stack_traces import PREFIX
from parallel.runtime.watch.stall_detection import WORKS, RankState, Stall, format_ranks

_LINES = 10
"""Ranks, or groups of ranks with the same activity, that fit on a screen."""
PROCESS_STATES = {
    "stopped": "its process is stopped (SIGSTOP, SIGTSTP or a debugger)",
    "running": "its process runs, and a library call holds Python's GIL",
    "gone": "its process is gone",
    "": "its process is stopped, its machine is gone, or the network between them is cut",
}
"""State of a silent process, by ``RankProcess.state``."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """One rank's reply to the coordinator's question."""

    where: str = ""
    """Position in our code."""
    states: Mapping[int, str] | None = None
    """State of the requested processes, as far as this machine knows."""


def stall_message(
    stall: Stall,
    states: Mapping[int, RankState],
    reports: Mapping[int, Report],
    processes: Mapping[int, RankProcess],
    *,
    timeout: float,
    folder: Path | None,
    hint: str = "",
) -> str:
    """Build the message; ``states`` and ``reports`` may lack unknown ranks."""
    lines = [
        f"ClusterError: the run hangs at step {max((s.step for s in states.values()), default=0)}, because of "
        f"{format_ranks(stall.ranks)}: {stall.reason} (run.timeout_seconds={timeout:g})."
    ]
    missing_ranks = [
        rank for rank in stall.ranks if rank in states and states[rank].silence > 0 and rank not in reports
    ]
    for rank in missing_ranks[:3]:
        process = processes.get(rank)
        where = f" (process {process.pid} on {process.host})" if process is not None else ""
        lines.append(f"Rank {rank}{where}: {PROCESS_STATES[_process_state(rank, processes, reports)]}.")
    lines.append("Each rank was in:")
    lines += _table(states, reports, stall)
    if folder is not None:
        lines.append(f"Thread stacks: {folder / PREFIX}N.txt, from every rank that responded.")
    lines.append(
        "Resume from the newest checkpoint with --run.resume latest. If ranks may take that long, raise "
        "run.timeout_seconds."
    )
    if hint:
        lines.append(hint)
    return "\n".join(lines)


def slow_rank_warning(
    ranks: tuple[int, ...], states: Mapping[int, RankState], processes: Mapping[int, RankProcess]
) -> str:
    """Return a one-line warning about ranks that others wait for."""
    state = states[ranks[0]]
    if state.silence > 0 and state.silence >= state.held:
        text = f"sent no heartbeat for {state.silence:.0f} s; last in: {state.activity}"
    else:
        waited = max((s.waited for s in states.values() if s.kind != WORKS), default=0.0)
        text = f"kept others waiting for {waited:.0f} s; for {state.held:.0f} s in: {state.activity}"
    where = f" on {processes[ranks[0]].host}" if ranks[0] in processes else ""
    return f"{format_ranks(ranks)}{where} {text}"


def state_line(state: RankState) -> str:
    """Return a rank's activity and its duration: "forward, layer 3 for 4.0 s"."""
    return f"{state.activity} for {state.held:.1f} s"


def _process_state(rank: int, processes: Mapping[int, RankProcess], reports: Mapping[int, Report]) -> str:
    """Return the process state of a silent rank, as seen by ranks on its machine, or by this machine."""
    for report in reports.values():
        if report.states and report.states.get(rank):
            return report.states[rank]
    if rank in processes:
        return processes[rank].state()
    return ""


def _table(states: Mapping[int, RankState], reports: Mapping[int, Report], stall: Stall) -> list[str]:
    """Return one line per group of ranks with the same activity, the cause first."""
    # Among a thousand ranks most wait at one position; the few others are of interest.
    groups: dict[tuple[bool, str, str], list[int]] = {}
    for rank, state in sorted(states.items()):
        where = ""
        if rank in reports:
            where = reports[rank].where
        groups.setdefault((rank not in stall.ranks, state.activity, where), []).append(rank)
    lines = []
    for (_, activity, where), ranks in sorted(groups.items(), key=lambda item: (item[0][0], item[1][0])):
        of_ranks = [states[rank] for rank in ranks]
        seconds = max(max(s.held, s.silence) for s in of_ranks)
        place = f"; {where}" if where else ""
        lines.append(f"  {format_ranks(ranks)}: {activity} ({seconds:.1f} s){place}")
    if len(lines) > _LINES:
        return [*lines[:_LINES], f"  … and {len(lines) - _LINES} more"]
    return lines

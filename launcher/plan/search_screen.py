"""A search as text."""

from __future__ import annotations

from launcher.plan.described import Rows
from launcher.plan.estimate import HEADROOM
from launcher.plan.hardware import Hardware
from launcher.plan.memory import gib
from launcher.plan.search import Candidate, Found, Nearest
from launcher.plan.settings import words
from launcher.plan.world import World
from launcher.wording import plural

_MOST_ROWS = 10


def count_line(found: Found, hardware: Hardware) -> str:
    """How many settings there were."""
    return (
        f"{found.tried:,} settings tried, {found.num_fitting:,} fit {hardware.name} with {HEADROOM:.0%} of its memory "
        f"left, and {gib(hardware.host_memory_bytes)} of the host's for each rank."
    )


def front_rows(found: Found) -> Rows:
    """Time against memory: what each further GiB buys; the choice is marked."""
    candidates = [*_thinned(found.front)]
    if found.fastest is not None and found.fastest not in candidates:
        candidates.append(found.fastest)
    rows = [
        [
            _mark(one, found),
            f"{one.seconds:,.4g} s",
            gib(one.peak_bytes),
            gib(one.host_bytes),
            words(one.settings),
        ]
        for one in candidates
    ]
    return ["", "a step", "device", "host", "settings"], rows


def nearest_lines(leanest: Candidate, near: Nearest, world: World) -> list[str]:
    """What to do where nothing fits."""
    hardware = leanest.hardware
    lines = [
        f"Nothing fits {plural(world.ranks, 'rank')}. The nearest settings: {words(leanest.settings)}.",
        f"They take {gib(leanest.peak_bytes)} of a device's {gib(hardware.memory_bytes * (1 - HEADROOM))} and "
        f"{gib(leanest.host_bytes)} of {gib(hardware.host_memory_bytes)} on the host.",
    ]
    if near.seq_len:
        lines.append(f"With them rows of {near.seq_len:,} tokens fit: --data.seq_len {near.seq_len}.")
    if near.world is not None and near.candidate is not None:
        lines.append(
            f"Rows of {leanest.config.data.seq_len:,} tokens fit {near.world.ranks} ranks: "
            f"{words(near.candidate.settings)}, {near.candidate.seconds:,.3g} s a step."
        )
    if not leanest.config.train.store_path:
        lines.append("A disk takes more: name a folder on a fast one with --train.store_path.")
    return lines


def _mark(candidate: Candidate, found: Found) -> str:
    if candidate is found.fastest:
        return "->"
    return ""


def _thinned(front: list[Candidate]) -> list[Candidate]:
    """At most so many rows, evenly."""
    step = -(-len(front) // _MOST_ROWS)
    return front[:: max(1, step)]

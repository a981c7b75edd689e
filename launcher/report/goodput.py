"""The report's part on effective training time: where the run's seconds went, attempt by attempt."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from launcher.metrics.goodput.account import KINDS, Attempt, Goodput, Kind, Seconds, effective_share
from launcher.report.figures import BLUE, GREEN, GREY, ORANGE, PALE_BLUE, RED, new_figure, styled, to_svg
from launcher.report.section import Section, Table
from launcher.report.text import duration
from launcher.wording import plural

MAX_ATTEMPTS = 16
"""Most attempts that have a row of the picture and of the table: the last ones."""
_COLUMNS = 480
"""Columns of the picture: what is shorter than one of them shows as a part of its height."""

_NAMES: list[Kind] = list(KINDS)
_SHOWN: dict[Kind, tuple[str, str]] = {
    "productive": ("productive", BLUE),
    "lost": ("lost", RED),
    "skipped": ("skipped", "#f0a3ad"),
    "stalled": ("stalled", "#b59a3c"),
    "data": ("waiting for data", "#7a5ea8"),
    "warm_up": ("first steps", "#4aa3a2"),
    "starting": ("starting", ORANGE),
    "saving": ("saving", GREEN),
    "validation": ("validation", PALE_BLUE),
    "other": ("other", GREY),
    "stopped": ("stopped", "#5b6068"),
    "paused": ("paused", "#d5d8dc"),
}
"""Name and colour of each kind."""
_ENDS = {
    "done": "done",
    "stopped": "stopped on request",
    "launcher": "launcher gone",
    "failed": "an error",
    None: "killed",
}


def goodput_section(goodput: Goodput) -> list[Section]:
    """Two parts: seconds of each kind with the timeline, and the attempts; none of a run without a timeline."""
    seconds = goodput.seconds()
    share = effective_share(seconds)
    if share is None:
        return []
    table = Table(headings=("", "Time", "Share", ""), rows=_kind_rows(seconds))
    parts = [
        Section(
            title="Effective training time",
            caption=_caption(goodput, seconds, share),
            picture=Markup(timeline_figure(goodput)),
            table=table,
        )
    ]
    if len(goodput.attempts) > 1:
        shown = goodput.attempts[-MAX_ATTEMPTS:]
        caption = "Times are those of each attempt's host."
        if len(shown) < len(goodput.attempts):
            caption = f"The last {len(shown)} of {len(goodput.attempts)}. {caption}"
        headings = ("Attempt", "Began", "Host", "Steps", "Ended by", "Lasted", "Productive", "Lost", "Until the next")
        first = len(goodput.attempts) - len(shown)
        rows = [_attempt_row(first + n, attempt) for n, attempt in enumerate(shown, start=1)]
        # The last one may go on: nothing has been said of its end.
        if shown[-1].how is None:
            rows[-1] = (*rows[-1][:4], "–", *rows[-1][5:])
        parts.append(Section(title="Attempts", caption=caption, table=Table(headings=headings, rows=rows)))
    return parts


def _caption(goodput: Goodput, seconds: Seconds, share: float) -> str:
    """The share, what it is a share of, and what is not known."""
    counted = goodput.wall - seconds["paused"]
    caption = f"{share:.1%} of {duration(counted)} trained what the run goes on from."
    if seconds["paused"] >= 1:
        whole = seconds["productive"] / goodput.wall
        caption += (
            f" Pauses between a stop on request and the next attempt, {duration(seconds['paused'])}, are not counted; "
            f"with them it is {whole:.1%}."
        )
    if goodput.stalls:
        caption += f" {plural(goodput.stalls, 'step')} stalled."
    if goodput.attempts[0].begin["step"]:
        caption += f" The timeline begins at step {goodput.attempts[0].begin['step']:,}."
    if goodput.skewed:
        caption += (
            f" Clocks disagree: {plural(goodput.skewed, 'attempt')} began before the one before had ended, and that "
            "time counts as 0."
        )
    return caption


def _kind_rows(seconds: Seconds) -> list[tuple[str, ...]]:
    counted = sum(seconds.values()) - seconds["paused"]
    rows = []
    for kind, meaning in KINDS.items():
        share = f"{seconds[kind] / counted:.2%}"
        if kind == "paused":
            share = "–"
        if seconds[kind] > 0:
            rows.append((_SHOWN[kind][0], duration(seconds[kind]), share, meaning))
    rows.append(("all", duration(counted + seconds["paused"]), "", ""))
    return rows


def _attempt_row(number: int, attempt: Attempt) -> tuple[str, ...]:
    began = datetime.fromtimestamp(attempt.began, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    seconds, first = attempt.seconds(), attempt.begin["step"] + 1
    steps = "none"
    if attempt.last_step >= first:
        steps = f"{first:,} to {attempt.last_step:,}"
    until = "–"
    if attempt.after is not None:
        until = f"{duration(attempt.after[1])} {attempt.after[0]}"
    lasted = [duration(x) for x in (attempt.tally.until, seconds["productive"], seconds["lost"])]
    return f"{number:,}", began, str(attempt.begin.get("host", "")), steps, _ENDS.get(attempt.how, ""), *lasted, until


@styled
def timeline_figure(goodput: Goodput) -> str:
    """Above a row for each attempt over the time, coloured by kind; below, all seconds as one bar."""
    attempts = goodput.attempts[-MAX_ATTEMPTS:]
    figure, (upper, lower) = new_figure(1, rows=2, height=1.9 + 0.28 * len(attempts))
    figure.get_layout_engine().set(hspace=0.08)  # type: ignore[union-attr]
    upper.get_subplotspec().get_gridspec().set_height_ratios([0.6 + 0.5 * len(attempts), 1])  # type: ignore[union-attr]
    begins, total = _begins(attempts)
    first = len(goodput.attempts) - len(attempts)
    unit, name = _unit(total)
    for row, (attempt, begin) in enumerate(zip(attempts, begins, strict=True)):
        _draw_attempt(upper, attempt, begin, total / _COLUMNS, row, unit)
    upper.set_yticks(range(len(attempts)), [f"{first + row + 1}" for row in range(len(attempts))])
    upper.set_ylim(len(attempts) - 0.4, -0.6)
    upper.set_xlim(0, total / unit)
    upper.grid(axis="y", visible=False)
    upper.set_ylabel("attempt")
    upper.set_xlabel(f"{name} since the first of them, without pauses")
    _draw_total(lower, goodput.seconds())
    return to_svg(figure, "timeline")


def _begins(attempts: Sequence[Attempt]) -> tuple[list[float], float]:
    """Where each attempt begins on an axis without pauses, and how long that axis is."""
    begins, at = [], 0.0
    for attempt in attempts:
        begins.append(at)
        at += attempt.tally.until
        if attempt.after is not None and attempt.after[0] == "stopped":
            at += attempt.after[1]
    return begins, max(at, 1e-9)


def _draw_attempt(axes: Axes, attempt: Attempt, begin: float, width: float, row: int, unit: float) -> None:
    """One row: in each column the kinds lie on each other, by their share of its time."""
    kinds, lengths = attempt.parts()
    if attempt.after is not None and attempt.after[0] == "stopped":
        kinds = np.append(kinds, _NAMES.index("stopped"))
        lengths = np.append(lengths, attempt.after[1])
    edges, shares = binned(kinds, lengths, width)
    # One outline for each kind: bars side by side would show seams.
    bottom = np.full(len(edges), row + 0.4)
    for number, kind in enumerate(_NAMES):
        # Up is smaller: the first attempt stands at the top.
        top = bottom - 0.8 * np.append(shares[number], shares[number][-1:])
        if shares[number].any():
            style = {"color": _SHOWN[kind][1], "step": "post", "linewidth": 0}
            axes.fill_between((begin + edges) / unit, bottom, top, **style)
        bottom = top


def binned(kinds: np.ndarray, lengths: np.ndarray, width: float) -> tuple[np.ndarray, np.ndarray]:
    """Edges of columns of ``width`` seconds, the last one narrower, and shares of each kind [kinds, columns]."""
    # What a kind has taken up to the end of each part, and by that, between them, up to the edge of each column.
    ends = np.concatenate([[0.0], np.cumsum(lengths)])
    # By rounding the last column can be next to nothing, or nothing: it then belongs to the one before.
    starts = np.arange(0.0, ends[-1], width)
    starts = np.append(starts[:1], starts[1:][ends[-1] - starts[1:] > 1e-6 * width])
    edges = np.append(starts, ends[-1])
    shares = np.zeros((len(_NAMES), len(edges) - 1))
    for number in np.unique(kinds):
        taken = np.concatenate([[0.0], np.cumsum(np.where(kinds == number, lengths, 0.0))])
        shares[number] = np.diff(np.interp(edges, ends, taken)) / np.diff(edges)
    return edges, shares


def _draw_total(axes: Axes, seconds: Seconds) -> None:
    """All seconds but pauses as one bar, with a legend of the kinds."""
    counted = sum(seconds.values()) - seconds["paused"]
    left = 0.0
    for kind in _NAMES:
        if kind == "paused" or not seconds[kind]:
            continue
        name, colour = _SHOWN[kind]
        share = seconds[kind] / counted
        axes.barh(0, share, left=left, color=colour, height=0.6, label=f"{name} {share:.1%}")
        left += share
    axes.set_yticks([0], ["all"])
    axes.set_xlim(0, 1)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.55), ncols=5, fontsize=7.5, handlelength=1.0)


def _unit(seconds: float) -> tuple[float, str]:
    """Seconds of the unit that an axis of this length counts in, and its name."""
    for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return size, name
    return 1.0, "seconds"

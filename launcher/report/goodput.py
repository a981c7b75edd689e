"""The report's part on stalls and lost time: the run's seconds by kind, over all attempts."""

from __future__ import annotations

from launcher.metrics.goodput.account import KINDS, Goodput, effective_share
from launcher.report.section import Section, Table
from launcher.report.text import duration
from launcher.wording import plural


def goodput_section(goodput: Goodput) -> list[Section]:
    """Return a table of seconds by kind; nothing for a run without a timeline."""
    seconds = goodput.seconds()
    share = effective_share(seconds)
    if share is None:
        return []
    counted = sum(seconds.values()) - seconds["paused"]
    caption = (
        f"{share:.1%} of {duration(counted)} trained the state that the run goes on from; "
        f"{plural(goodput.stalls, 'step')} stalled. Pauses do not count."
    )
    if goodput.skewed:
        caption += (
            f" Clocks disagree: {plural(goodput.skewed, 'attempt')} began before the one before had ended, and that "
            "time counts as 0."
        )
    rows = []
    for kind, meaning in KINDS.items():
        of_counted = "–" if kind == "paused" else f"{seconds[kind] / counted:.2%}"
        if seconds[kind] > 0:
            rows.append((kind.replace("_", " "), duration(seconds[kind]), of_counted, meaning))
    table = Table(headings=("", "Time", "Share", ""), rows=rows)
    return [Section(title="Stalls and lost time", caption=caption, table=table)]

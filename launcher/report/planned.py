"""The report's part on the plan: what the run expected of its memory and its steps, beside what it measured."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes

from launcher.metrics.record import Record
from launcher.plan.memory import gib
from launcher.report.figures import BLUE, GREEN, GREY, ORANGE, PALE_BLUE, RED, new_figure, styled, to_svg
from launcher.report.run import Run
from launcher.report.section import Section, Table

_COLOURS = (BLUE, PALE_BLUE, GREEN, ORANGE, RED, "#7a5ea8", "#b59a3c", "#4aa3a2")
_ELSEWHERE = ("kept_on_host", "kept_on_disk")
"""Bytes that are not in the device's peak."""
_INSTEAD = ("after_backward", "optimizer_step")
"""Bytes that take the place of what is kept and passing, where they are more."""


def planned_section(run: Run) -> list[Section]:
    """The newest plan, and the comparison at the end of the run where it came to one; nothing where none was made."""
    plans = [record for record in run.of_kind("event") if record["event"] == "plan"]
    if not plans:
        return []
    plan = plans[-1]
    checked = [record for record in run.of_kind("event") if record["event"] == "plan_checked"]
    measured: Record = {}
    if checked and checked[-1]["step"] >= plan["step"]:
        measured = checked[-1]
    caption = f"Speeds are those of the profile of {plan['hardware']} (`longctx measure` makes one of your machine)."
    if "step_seconds" not in plan:
        caption = f"No profile says how fast {plan['hardware']} is: `longctx measure` makes one."
    if not measured:
        caption += " The run has not come to its end yet, where the two are compared."
    return [
        Section(
            title="Plan",
            caption=caption,
            picture=Markup(plan_figure(plan, measured)),
            table=Table(headings=("", "Planned", "Measured", "Plan over measured"), rows=_rows(plan, measured)),
        )
    ]


def _rows(plan: Record, measured: Record) -> list[tuple[str, ...]]:
    found = [("peak of a rank's memory", gib(plan["peak_bytes"]), "–", "–")]
    if measured:
        found = [(*found[0][:2], gib(measured["peak_bytes"]), _signed(measured.get("peak_error")))]
    if "step_seconds" in plan:
        seconds, error = "–", "–"
        if measured.get("step_seconds"):
            seconds, error = f"{measured['step_seconds']:.3g} s", _signed(measured.get("seconds_error"))
        found.append(("a step", f"{plan['step_seconds']:.3g} s", seconds, error))
    return found


def _signed(error: float | None) -> str:
    if error is None:
        return "–"
    return f"{error:+.1%}"


@styled
def plan_figure(plan: Record, measured: Record) -> str:
    """Planned bytes by kind and planned seconds by part, each as one bar over the bar of what was measured."""
    figure, axes = new_figure(2, height=2.6)
    left, right = axes
    _bars(left, bytes_by_kind(plan["bytes"]), measured.get("peak_bytes"), scale=2**30)
    left.set_title("Peak of a rank's memory")
    left.set_xlabel("GiB")
    if "seconds" in plan:
        _bars(right, plan["seconds"], measured.get("step_seconds"), scale=1.0)
    right.set_title("A step")
    right.set_xlabel("seconds")
    return to_svg(figure, "plan")


def bytes_by_kind(of_bytes: dict[str, int]) -> dict[str, float]:
    """What is alive at the peak, by kind."""
    within = ("gathered", "reduction", "kept", "passing")
    held = {name: size for name, size in of_bytes.items() if name not in (*within, *_ELSEWHERE, *_INSTEAD)}
    others = {name: of_bytes[name] for name in within}
    largest = max(_INSTEAD, key=lambda name: of_bytes[name])
    if of_bytes[largest] > sum(others.values()):
        others = {largest: of_bytes[largest]}
    return {**held, **others}


def _bars(axes: Axes, planned: dict[str, Any], measured: float | None, *, scale: float) -> None:
    left = 0.0
    shown = {name: value for name, value in planned.items() if value}
    for (name, value), colour in zip(shown.items(), _COLOURS * 2, strict=False):
        axes.barh(1, value / scale, left=left, color=colour, height=0.55, label=name.replace("_", " "))
        left += value / scale
    labels = {1: "planned"}
    if measured:
        axes.barh(0, measured / scale, color=GREY, height=0.55)
        labels[0] = "measured"
    axes.set_yticks(list(labels), list(labels.values()))
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=4, fontsize=7.5, handlelength=1.0)

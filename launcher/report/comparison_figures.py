"""Pictures of several runs in one, a colour a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from launcher.metrics.console import short_number
from launcher.report.figures import Series, finish, new_figure, styled, thin_curve, to_svg
from launcher.report.run import Run

COLOURS = ("#3b82c4", "#e08a1e", "#3a9d6e", "#d1495b", "#8e6bbf", "#8a8f98", "#b5651d", "#17a2b8")
"""Of the runs, in their order; more runs begin again."""


@styled
def loss_figure(runs: Sequence[Run], names: Sequence[str], axis: str) -> str | None:
    """Smoothed training losses and validation losses over ``axis``, ``tokens`` or ``step``; None without any."""
    figure, (axes,) = new_figure(1, height=3.9)
    drawn = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        loss = Series.of(run.train, "loss")
        if loss.drawable:
            thin = _over(run, loss.smoothed().thinned(), axis)
            axes.plot(thin.steps, thin.values, color=colour, label=name)
            drawn.append(loss)
        checked = Series.of(run.validations, "loss")
        if checked.drawable:
            points = _over(run, checked, axis)
            # Named once: where a run has no training loss drawn, by its validations.
            label = None if loss.drawable else name
            axes.plot(points.steps, points.values, "o--", color=colour, markersize=4, linewidth=0.8, label=label)
            drawn.append(checked)
    if not drawn:
        return None
    finish(axes, axis, "loss (nats a token)", drawn[0])
    if axis == "tokens":
        _count_tokens(axes)
    axes.legend(loc="upper right")
    return to_svg(figure, f"loss-{axis}")


@styled
def speed_figure(runs: Sequence[Run], names: Sequence[str]) -> str | None:
    """Tokens a second and gradient norm over the tokens; None where neither was logged."""
    figure, (left, right) = new_figure(2, height=3.0)
    is_drawn = False
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        for axes, key in ((left, "tokens_per_second"), (right, "grad_norm")):
            series = Series.of(run.train, key)
            is_drawn = is_drawn or series.drawable
            thin_curve(axes, _over(run, series, "tokens"), colour, name)
    if not is_drawn:
        return None
    left.set_title("Tokens a second, whole world")
    right.set_title("Gradient norm before clipping")
    for axes in (left, right):
        finish(axes, "tokens", "", None)
        _count_tokens(axes)
    left.set_ylim(bottom=0)
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    right.legend(loc="upper right")
    return to_svg(figure, "speed")


def _over(run: Run, series: Series, axis: str) -> Series:
    """The series over the run's tokens instead of its steps; points of steps that are not known are left out."""
    if axis == "step":
        return series
    known = Series.of(run.train, "tokens")
    if not known.drawable:
        return Series(steps=np.empty(0), values=np.empty(0))
    steps, tokens = np.append(0.0, known.steps), np.append(0.0, known.values)
    return Series(steps=np.interp(series.steps, steps, tokens), values=series.values)


def _count_tokens(axes: Axes) -> None:
    """Write tokens as 1.5M."""
    formatter: Any = FuncFormatter(lambda value, _: short_number(value))
    axes.xaxis.set_major_formatter(formatter)

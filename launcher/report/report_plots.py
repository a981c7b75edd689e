"""Report plots: each function takes numbers and returns one inline SVG in the page's colors.

Object-oriented matplotlib with the SVG backend only: no window, no pyplot state. Text stays text, and the two colors
that depend on a light or dark page are written as CSS.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

from launcher.metrics.metrics_console import short_number

INK, GRID = "#0a0b0c", "#0d0e0f"
"""Placeholders that ``to_svg`` replaces with the page's text and grid colors."""
BLUE, PALE_BLUE, ORANGE, GRAY, RED, GREEN = "#3b82c4", "#9cc3e6", "#e08a1e", "#8a8f98", "#d1495b", "#3a9d6e"

MAX_POINTS = 1200
"""Maximum points per curve; longer runs draw means over equal groups of steps."""

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "longctx",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GRAY,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True, kw_only=True)
class Series:
    """One quantity over steps; NaN if not finite or unknown."""

    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]], key: str) -> Series:
        """Build the series for ``key`` from all records that have it."""
        rows = [(record["step"], record[key]) for record in records if record.get(key) is not None]
        values = np.array([value for _, value in rows], dtype=float)
        values[~np.isfinite(values)] = np.nan
        return cls(steps=np.array([step for step, _ in rows], dtype=float), values=values)

    @property
    def drawable(self) -> bool:
        return bool(np.isfinite(self.values).any())

    def thinned(self, limit: int = MAX_POINTS) -> Series:
        """Return at most ``limit`` points, each the mean over a group of steps; NaN only if a full group is NaN."""
        size = math.ceil(len(self.steps) / limit)
        if size <= 1:
            return self
        return Series(steps=_group_means(self.steps, size), values=_group_means(self.values, size))

    def smoothed(self) -> Series:
        """Return a centred running mean over the finite values in about a thirtieth of the run.

        At the start, with fast-falling losses, it averages fewer steps. At the end it is a line fitted to the last
        steps.
        """
        half = max(2, len(self.values) // 60)
        # Differences between running sums: the cost does not depend on the width.
        known = np.isfinite(self.values)
        sums = np.concatenate([[0.0], np.cumsum(np.where(known, self.values, 0.0))])
        counts = np.concatenate([[0], np.cumsum(known)])
        index = np.arange(len(self.values))
        half_widths = np.minimum(half, np.minimum(index, len(index) - 1 - index))
        start, stop = index - half_widths, index + half_widths + 1
        with np.errstate(invalid="ignore", divide="ignore"):
            means = (sums[stop] - sums[start]) / (counts[stop] - counts[start])
        # A mean over ever fewer steps would end in a hook towards the last step, so fit a line.
        last = index[known][index[known] >= len(index) - 2 * half - 1]
        if len(last) > half:
            means[-half:] = np.polyval(np.polyfit(last, self.values[last], 1), index[-half:])
        return Series(steps=self.steps, values=means)


def _group_means(values: np.ndarray, size: int) -> np.ndarray:
    padded = np.concatenate([values, np.full(-len(values) % size, np.nan)]).reshape(-1, size)
    counts = np.isfinite(padded).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nansum(padded, axis=1) / counts


styled = matplotlib.rc_context(_STYLE)
"""Decorator for every plot: matplotlib reads its defaults while it draws, not only when a figure is created."""


# One plot each.


@styled
def plot_losses(
    train: Sequence[Any], validation_records: Sequence[Any], resumes: Sequence[int], error_steps: Sequence[int] = ()
) -> str:
    """Draw training loss, raw and smoothed, validation points, and the unigram entropy as a dashed line."""
    fig, (axes,) = new_fig(1, height=3.7)
    loss = Series.of(train, "loss")
    if loss.drawable:
        thin = loss.thinned()
        axes.plot(thin.steps, thin.values, _dots(thin), color=BLUE, alpha=0.45, linewidth=0.8, label="train")
        smooth = loss.smoothed().thinned()
        axes.plot(smooth.steps, smooth.values, color=BLUE, label="train, smoothed")
    validation_loss = Series.of(validation_records, "loss")
    if validation_loss.drawable:
        axes.plot(
            validation_loss.steps,
            validation_loss.values,
            "o-",
            color=ORANGE,
            markersize=4,
            linewidth=1,
            label="validation",
        )
    entropy = Series.of(validation_records, "unigram_entropy")
    if entropy.drawable:
        level = entropy.values[np.isfinite(entropy.values)][-1]
        axes.axhline(level, color=GRAY, linestyle="--", linewidth=1.2, label="unigram entropy")
    # At most 50 marks: a diverged run would be all red.
    non_finite_steps = loss.steps[~np.isfinite(loss.values)]
    _mark_steps(axes, non_finite_steps[:50], color=RED, linestyle="-", label="not finite")
    _mark_steps(axes, resumes, color=GREEN, linestyle=":", label="resumed")
    _mark_steps(axes, error_steps, color=RED, linestyle="--", label="wrong number")
    finish(axes, "step", "loss (nats per token)", loss)
    axes.legend(ncols=3, loc="upper right")
    _token_axis(axes, train)
    return to_svg(fig, "loss")


def _token_axis(axes: Axes, train: Sequence[Any]) -> None:
    tokens = Series.of(train, "tokens")
    if len(tokens.steps) < 2 or not tokens.drawable:
        return
    # Tokens per step vary with padding: interpolate between records, and extend past them at the mean rate.
    last, total = tokens.steps[-1], tokens.values[-1]
    steps = np.concatenate([[-last, 0.0], tokens.steps, [2 * last]])
    counts = np.concatenate([[-total, 0.0], tokens.values, [2 * total]])
    # A secondary axis needs invertible functions: repeated or falling counts have no inverse.
    if not (np.diff(counts) > 0).all() or not (np.diff(steps) > 0).all():
        return
    functions: Any = (lambda x: np.interp(x, steps, counts), lambda x: np.interp(x, counts, steps))
    upper = axes.secondary_xaxis("top", functions=functions)
    upper.set_xlabel("tokens")
    upper.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


@styled
def plot_position_loss(first: Mapping[str, Any] | None, last: Mapping[str, Any]) -> str:
    """Draw loss by document position on a log axis, for the last validation and the first (None: only one exists)."""
    fig, (axes,) = new_fig(1, height=3.2)
    if first is not None:
        centers, losses = position_points(first)
        label = f"first validation, step {first['step']:,}"
        axes.plot(centers, losses, "o-", color=PALE_BLUE, markersize=3.5, linewidth=1.2, label=label)
    centers, losses = position_points(last)
    axes.plot(centers, losses, "o-", color=ORANGE, markersize=4.5, label=f"last validation, step {last['step']:,}")
    if last.get("unigram_entropy") is not None:
        axes.axhline(last["unigram_entropy"], color=GRAY, linestyle="--", linewidth=1.2, label="unigram entropy")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: binary_number(value)))
    axes.set_xlabel("position in the document, counted from 1 (tokens, log scale)")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(loc="best")
    return to_svg(fig, "position")


def position_points(validation: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Return each bin's middle on a log axis and its loss, with positions from 1; skip bins without targets."""
    # Count from 1, because a log axis has no 0.
    bins = [
        entry for entry in validation["loss_by_position"] if entry.get("num_targets", 1) and entry["loss"] is not None
    ]
    return [math.sqrt((entry["start"] + 1) * entry["stop"]) for entry in bins], [entry["loss"] for entry in bins]


@styled
def plot_speed(train: Sequence[Any], resumes: Sequence[int]) -> str:
    """Draw tokens per second with their median, step and data wait seconds, model TFLOP/s with any MFU, and memory."""
    fig, axes_list = new_fig(2, rows=2, height=5.4)
    left, right, below_left, below_right = axes_list
    speed = Series.of(train, "tokens_per_second")
    thin_curve(left, speed, BLUE, None)
    if speed.drawable:
        median = float(np.nanmedian(speed.values))
        left.axhline(
            median, color=GRAY, linestyle="--", linewidth=1.2, zorder=3, label=f"median {short_number(median)}"
        )
        left.legend(loc="lower right")
    left.set_title("Tokens per second, all ranks")
    finish(left, "step", "tokens/s", None)
    left.set_ylim(bottom=0)
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    seconds = Series.of(train, "step_seconds")
    thin_curve(right, seconds, BLUE, "step")
    thin_curve(right, Series.of(train, "data_wait_seconds"), ORANGE, "waiting for data")
    right.set_title("Seconds per step")
    finish(right, "step", "seconds", None)
    _log_if_spiky(right, seconds)
    # Leave room for the legend above the curves.
    bottom, top = right.get_ylim()
    if right.get_yscale() == "linear":
        right.set_ylim(bottom=0, top=1.3 * top)
    else:
        right.set_ylim(top=top * (top / bottom) ** 0.3)
    right.legend(loc="upper right")
    _draw_work(below_left, train)
    memory = Series.of(train, "max_memory_bytes")
    thin_curve(below_right, Series(steps=memory.steps, values=memory.values / 2**30), ORANGE, None)
    below_right.set_title("Peak memory so far, rank 0")
    finish(below_right, "step", "GiB", None)
    below_right.set_ylim(bottom=0, top=1.15 * below_right.get_ylim()[1])
    for axes in axes_list:
        _mark_steps(axes, resumes, color=GREEN, linestyle=":", label=None)
    return to_svg(fig, "speed")


def _draw_work(axes: Axes, train: Sequence[Any]) -> None:
    """Draw model TFLOP/s per device, with MFU on the right if known."""
    work, used = Series.of(train, "model_tflops"), Series.of(train, "mfu")
    thin_curve(axes, work, BLUE, None)
    axes.set_title("Model TFLOP/s per device")
    finish(axes, "step", "TFLOP/s", None)
    axes.set_ylim(bottom=0)
    # TFLOP/s and MFU differ only by the device's peak rate: one curve, two axes.
    if used.drawable and work.drawable and np.nanmean(used.values) > 0:
        peak = float(np.nanmean(work.values) / np.nanmean(used.values))
        functions: Any = (lambda y: y / peak, lambda y: y * peak)
        share = axes.secondary_yaxis("right", functions=functions)
        share.set_ylabel("MFU")
        share.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


# Shared by all plots.


def new_fig(columns: int, *, rows: int = 1, height: float) -> tuple[Figure, list[Axes]]:
    """Return an empty figure, ten inches wide, and its panels, row by row."""
    fig = Figure(figsize=(10, height), layout="constrained")
    FigureCanvasSVG(fig)
    fig.patch.set_alpha(0.0)
    grid = fig.subplots(rows, columns, squeeze=False)
    axes_list = [axes for row in grid for axes in row]
    for axes in axes_list:
        axes.patch.set_alpha(0.0)
    return fig, axes_list


def thin_curve(axes: Axes, series: Series, color: str, label: str | None) -> None:
    """Draw a series with at most ``MAX_POINTS`` points, if it has any."""
    if series.drawable:
        thin = series.thinned()
        axes.plot(thin.steps, thin.values, _dots(thin), color=color, linewidth=1.1, label=label)


def _dots(series: Series) -> str:
    """Return a plain line style, with dots if there are too few points to see the line."""
    if len(series.steps) > 12:
        return "-"
    return ".-"


def binary_number(value: float) -> str:
    """Format integer positions like context lengths: 512, 4K, 1M (K = 1024)."""
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if value >= size:
            return f"{value / size:g}{unit}"
    # matplotlib also requests labels for ticks outside the axis.
    if value < 1:
        return ""
    return f"{value:g}"


def finish(axes: Axes, xlabel: str, ylabel: str, scale_by: Series | None) -> None:
    """Label the axes, with integer steps below; ``scale_by`` decides whether the y-axis is logarithmic."""
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.margins(x=0.015)
    # A run with one step has zero width: widen the range.
    low, high = axes.get_xlim()
    if high - low < 2:
        axes.set_xlim((low + high) / 2 - 1, (low + high) / 2 + 1)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    if scale_by is not None:
        _log_if_spiky(axes, scale_by)


def _log_if_spiky(axes: Axes, series: Series) -> None:
    """Use a log axis if one spike would flatten all other values on a linear one."""
    known = series.values[np.isfinite(series.values)]
    if len(known) and known.min() > 0 and known.max() > 20 * np.median(known):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())


def _mark_steps(axes: Axes, steps: Sequence[float] | np.ndarray, *, color: str, linestyle: str, label: Any) -> None:
    """Draw vertical lines at these steps, with a single legend entry."""
    for step in steps:
        axes.axvline(step, color=color, linestyle=linestyle, linewidth=1.3, label=label)
        label = None


def to_svg(fig: Figure, name: str) -> str:
    """Return the figure as an ``<svg>`` element that fills its container; its ids start with ``name`` to be unique."""
    buffer = io.StringIO()
    fig.savefig(buffer, format="svg", dpi=150, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    # Inline SVG has no XML header. Without date and version, equal numbers give equal bytes.
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Without a size it fills the page's width; its viewBox keeps the proportions.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    # matplotlib uses the same ids in each figure, but ids must be unique on a page.
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    # A function: in a template, a name that starts with a digit would be parsed as part of the group number.
    svg = re.sub(r'url\(#|href="#', lambda found: f"{found[0]}{name}-", svg)
    return svg.replace(INK, "currentColor").replace(GRID, "var(--grid)")


def standalone(svg: str) -> str:
    """Convert an SVG from ``to_svg`` to a separate file, dark on white: there is no page to take colors from."""
    svg = svg.replace("currentColor", "#1c2128").replace("var(--grid)", "#e6e9ed")
    # A viewer without a page shows its own background, which may be dark.
    return re.sub(r"(<svg[^>]*?)>", r'\1 style="background: #fff">', svg, count=1)

"""Evaluation plots. Each is drawn from rows built by ``tables.py`` and includes its caption.

``name`` makes a plot's ids unique on a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from launcher.report.evaluation.evaluation_tables import Rows
from launcher.report.report_plots import BLUE, GRAY, GREEN, ORANGE, RED, binary_number, new_fig, styled, to_svg

_TASK_COLORS = (BLUE, ORANGE, GREEN, RED, "#8e6bbf", "#7f6a4d", "#c45fa0", GRAY, "#9aa832", "#2f9fb0")
_MOST_BANDS = 4
"""Maximum curves with intervals drawn as bands: more would overlap."""
_MAX_SINGLE_LINE_COLUMNS, _MAX_TWO_LINE_COLUMNS = 10, 22
"""Maximum columns of a needle plot with room for score and n side by side, and one below the other."""


@styled
def plot_needle_scores(subplots: Sequence[tuple[str, Rows]], caption: str, name: str) -> str:
    """Draw score by length and depth on a fixed scale from 0 to 1, with n in every cell; untested cells are blank.

    Each panel has a title, for comparing models; all panels share the same cells.
    """
    every = [row for _, rows in subplots for row in rows]
    lengths = sorted({row["length"] for row in every})
    depths = sorted({row["depth"] for row in every})
    # All panels share lengths and depths, so that models compare cell by cell.
    fig, axes_list = new_fig(len(subplots), height=1.6 + 0.36 * len(depths))
    image = None
    for axes, (title, rows) in zip(axes_list, subplots, strict=True):
        image = _draw_cells(axes, rows, lengths, depths, columns=len(subplots) * len(lengths))
        axes.set_title(title)
    axes_list[0].set_ylabel("depth of the answer")
    assert image is not None, "no panel"
    bar = fig.colorbar(image, ax=axes_list, ticks=[0, 0.25, 0.5, 0.75, 1], pad=0.015, fraction=0.03)
    bar.set_label("score")
    write_caption(fig, caption)
    return to_svg(fig, name)


def _draw_cells(axes: Axes, rows: Rows, lengths: list[int], depths: list[float], *, columns: int) -> QuadMesh:
    """Draw one panel, with a column per length and a row per depth; all panels together have ``columns`` columns."""
    grid, counts = np.full((len(depths), len(lengths)), np.nan), {}
    for row in rows:
        at = depths.index(row["depth"]), lengths.index(row["length"])
        counts[at] = row["n"]
        if row["mean"] is not None:
            grid[at] = row["mean"]
    # Labels must not overlap: score and n side by side, then on two lines, then in a smaller font.
    separator, size = "  ", 7.5
    if columns > _MAX_SINGLE_LINE_COLUMNS:
        separator, size = "\n", 7.5 * min(1, _MAX_TWO_LINE_COLUMNS / columns)
    texts = {at: f"{grid[at]:.2f}{separator}n={count}" for at, count in counts.items()}
    return _draw_grid(axes, grid, texts, lengths, [f"{depth:.0%}" for depth in depths], most=1, size=size)


def _draw_grid(
    axes: Axes,
    grid: np.ndarray,
    texts: Mapping[tuple[int, int], str],
    lengths: Sequence[int],
    names: Sequence[str],
    *,
    most: float,
    size: float = 7.5,
) -> QuadMesh:
    """Draw numbers as colored cells with their texts, one column per length; unknown cells are blank."""
    edges = [np.arange(count + 1) - 0.5 for count in (len(lengths), len(names))]
    # Fixed from 0 to ``most``, so that plots of two models can be compared.
    image = axes.pcolormesh(
        *edges,
        np.ma.masked_invalid(grid),
        cmap=matplotlib.colormaps["viridis"],
        vmin=0,
        vmax=most,
        edgecolors=GRAY,
        linewidth=0.4,
    )
    for y, x in np.argwhere(np.isfinite(grid)):
        # Light text on dark cells.
        ink = "#ffffff" if grid[y, x] < 0.6 * most else "#111111"
        axes.text(x, y, texts[y, x], ha="center", va="center", fontsize=size, color=ink)
    axes.grid(False)
    axes.invert_yaxis()
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("length (tokens)")
    return image


@styled
def plot_length_scores(rows: Rows, areas: Rows, caption: str, name: str) -> str:
    """Draw score over length on a log axis, one curve per task, with its area in the legend."""
    named = {row["task"]: row for row in areas}
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    fig, (axes,) = new_fig(1, height=3.4 + 0.11 * len(tasks))
    for number, task in enumerate(tasks):
        own = [row for row in rows if row["task"] == task]
        lengths, means = [row["length"] for row in own], [row["mean"] for row in own]
        color = _TASK_COLORS[number % len(_TASK_COLORS)]
        label = f"{task}, area {with_interval(named[task])}"
        style = ("-", "--", ":")[number // len(_TASK_COLORS) % 3]
        axes.plot(lengths, means, f"o{style}", color=color, markersize=3.5, label=label)
        if len(tasks) <= _MOST_BANDS:
            low, high = [row["low"] for row in own], [row["high"] for row in own]
            axes.fill_between(lengths, low, high, color=color, alpha=0.15, linewidth=0)
        # With a single curve, fill the area that its score measures.
        if len(tasks) == 1:
            axes.fill_between(lengths, 0, means, color=color, alpha=0.08, linewidth=0)
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel("score")
    _length_axis(axes, [row["length"] for row in rows], "length (tokens, log scale)")
    axes.set_title(f"All tasks: area {with_interval(named['all tasks'])}")
    fig.legend(loc="outside right upper", fontsize=7.5, handlelength=3.2)
    write_caption(fig, caption)
    return to_svg(fig, name)


@styled
def plot_ruler_scores(rows: Rows, caption: str, name: str) -> str:
    """Draw RULER scores in per cent as a table: one row per task, then their average; one column per length."""
    columns = [column for column in rows[0] if column != "task"]
    grid = np.array([[row[column] for column in columns] for row in rows], dtype=float)
    fig, (axes,) = new_fig(1, height=1.4 + 0.3 * len(rows))
    texts = {(int(y), int(x)): f"{grid[y, x]:.2f}" for y, x in np.argwhere(np.isfinite(grid))}
    image = _draw_grid(axes, grid, texts, [int(column) for column in columns], [row["task"] for row in rows], most=100)
    # Separate the average from the tasks.
    axes.axhline(len(rows) - 1.5, color=RED, linewidth=1.2)
    bar = fig.colorbar(image, ax=axes, ticks=[0, 25, 50, 75, 100], pad=0.015, fraction=0.03)
    bar.set_label("score (per cent)")
    write_caption(fig, caption)
    return to_svg(fig, name)


@styled
def plot_loss_bins(by_position: Rows, by_distance: Rows, caption: str, name: str) -> str:
    """Draw loss by position in the text, and by distance to a pair's previous occurrence, one curve per length."""
    fig, (left, right) = new_fig(2, height=3.4)
    # Count from 1, because a log axis has no 0.
    _loss_curves(left, by_position, first=1)
    left.set_title("By position")
    left.set_xlabel("position in the text, counted from 1 (tokens, log scale)")
    left.set_ylabel("loss (nats per token)")
    # Bins that start at 0 hold pairs without an earlier occurrence, so they have no distance.
    _loss_curves(right, [row for row in by_distance if row["start"] > 0], first=0)
    right.set_title("By distance to the token pair's previous occurrence")
    right.set_xlabel("distance (tokens, log scale)")
    left.legend(loc="best")
    write_caption(fig, caption)
    return to_svg(fig, name)


def _loss_curves(axes: Axes, rows: Rows, *, first: int) -> None:
    """Draw one curve per length, with its interval as a band; ``first`` is the first token's number in a text."""
    for number, length in enumerate(sorted({row["length"] for row in rows})):
        own = [row for row in rows if row["length"] == length]
        # Geometric mean: a bin's middle on a log axis.
        centers = [math.sqrt((row["start"] + first) * (row["stop"] - 1 + first)) for row in own]
        color = _TASK_COLORS[number % len(_TASK_COLORS)]
        axes.plot(centers, [row["loss"] for row in own], "o-", color=color, markersize=3, label=f"{length:,} tokens")
        banded = [(center, row) for center, row in zip(centers, own, strict=True) if row["low"] is not None]
        # A single text has no interval.
        if banded:
            low, high = [row["low"] for _, row in banded], [row["high"] for _, row in banded]
            axes.fill_between([center for center, _ in banded], low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: binary_number(value)))


def _length_axis(axes: Axes, lengths: Sequence[int], label: str) -> None:
    """Set up a log axis with one tick per measured length."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(lengths))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel(label)


def write_caption(fig: Figure, caption: str) -> None:
    """Write model, lengths, date and n below the plot: it may be shown without its page."""
    fig.supxlabel(caption, fontsize=7.5, color=GRAY, parse_math=False)


def with_interval(row: dict[str, Any]) -> str:
    """Format a score with its 95 % interval."""
    return f"{row['mean']:.3f} ({row['low']:.3f} to {row['high']:.3f})"

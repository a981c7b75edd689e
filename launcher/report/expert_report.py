"""Report section on experts: load over time in plots and a table, and dead experts by name.

Axes: S steps, C heat map columns (sums over neighbouring steps), L expert layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator, PercentFormatter

from launcher.metrics.expert_load import (
    DEAD_AFTER_STEPS,
    expert_name,
    idle_experts,
    idle_share,
    layer_numbers,
    load_entropy,
    max_over_mean,
)
from launcher.metrics.record import Record
from launcher.report.report_plots import Series, finish, new_fig, styled, thin_curve, to_svg
from launcher.wording import format_count

MAX_COLUMNS = 160
"""Maximum heat map columns; longer runs sum the loads of neighbouring steps."""
MAX_LAYER_PLOTS = 6
"""Maximum layers with their own heat map or curve; the map over all layers and the table include every layer."""

_LAYER_COLORS = ("#3b82c4", "#e08a1e", "#3a9d6e", "#d1495b", "#8e6bbf", "#8a8f98")
_CURVES = (
    ("expert_max_violation", "Max violation (busiest expert / mean − 1)"),
    ("expert_mean_violation", "Mean violation (mean distance from the mean / mean)"),
    ("router_entropy", "Router entropy per token (nats)"),
    ("router_logit_rms", "Router logits (root mean square)"),
    ("expert_dropped_share", "Share of assignments dropped by capacity"),
)


def routed_records(train: Sequence[Record]) -> list[Record]:
    """Return records from steps that ran a layer with experts; empty if all of them lack full counts."""
    routed = [record for record in train if record.get("expert_load") or record.get("expert_idle")]
    if not whole_records(routed):
        return []
    return routed


def whole_records(routed: Sequence[Record]) -> list[Record]:
    """Return records with all counts: every step of a small model, some of a large one (``expert_load.py``)."""
    return [record for record in routed if record.get("expert_load")]


def uneven_rows(routed: Sequence[Record]) -> list[int]:
    """Return the ``expert_load`` rows to draw: all, or the ``MAX_LAYER_PLOTS`` least balanced over the full run."""
    # Use totals over the full run: the least balanced rows vary between steps, and the plot would vary with them.
    totals_LE = _loads(whole_records(routed)).sum(axis=0)
    worst = sorted(range(len(totals_LE)), key=lambda row: -_or_zero(max_over_mean(totals_LE[row].tolist())))
    return sorted(worst[:MAX_LAYER_PLOTS])


def dead_experts(routed: Sequence[Record], window: int = DEAD_AFTER_STEPS) -> list[str]:
    """Return ``name (steps a to b, c to d)`` for experts idle during ``window`` or more consecutive logged steps."""
    layers, num_experts = layer_numbers(routed[-1]), len(whole_records(routed)[-1]["expert_load"][0])
    steps = [record["step"] for record in routed]
    idle_SLE = np.array([idle_experts(record, num_experts) for record in routed])
    found: list[str] = []
    for row, expert in np.argwhere(idle_SLE.sum(axis=0) >= window):
        # Padded with 0 at both ends, the series changes in pairs: start and stop of each idle span.
        edges = np.flatnonzero(np.diff(np.concatenate([[0], idle_SLE[:, row, expert].astype(int), [0]])))
        spans = [(start, stop) for start, stop in edges.reshape(-1, 2) if stop - start >= window]
        if spans:
            span_text = ", ".join(f"{steps[start]:,} to {steps[stop - 1]:,}" for start, stop in spans)
            found.append(f"{expert_name(layers[row], int(expert))} (steps {span_text})")
    return found


def expert_table(routed: Sequence[Record]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return headings and one row per layer: balance in the last and first tenth of the run, and in the worst step."""
    whole = whole_records(routed)
    num_recent = max(1, len(whole) // 10)
    loads_SLE, rows = _loads(whole), []
    for row, layer in enumerate(layer_numbers(routed[-1])):
        by_step = [_max_over_mean(record, row) for record in routed]
        # Worst over every step: max/mean is known even in steps without written counts.
        worst = max(range(len(by_step)), key=lambda step: _or_zero(by_step[step]))
        recent = loads_SLE[-num_recent:, row].sum(axis=0).tolist()
        start = loads_SLE[:num_recent, row].sum(axis=0).tolist()
        # With one expert there is no reference: ln 1 is 0.
        entropy = "–"
        if len(recent) > 1:
            entropy = f"{load_entropy(recent) / math.log(len(recent)):.3f}"
        rows.append(
            (
                str(layer),
                f"{max_over_mean(recent):.2f}",
                f"{max_over_mean(start):.2f}",
                f"{by_step[worst]:.2f} (step {routed[worst]['step']:,})",
                f"{idle_share(recent):.0%}",
                entropy,
            )
        )
    span = format_count(num_recent, "step")
    if len(whole) < len(routed):
        span = format_count(num_recent, "recorded step")
    return ("Layer", f"max/mean, last {span}", f"first {span}", "worst step", "idle experts", "entropy / ln E"), rows


@styled
def plot_expert_loads(routed: Sequence[Record]) -> str:
    """Draw each expert's load over the mean against steps, one heat map per layer."""
    routed = whole_records(routed)
    steps, layers, loads_SLE = [record["step"] for record in routed], layer_numbers(routed[-1]), _loads(routed)
    rows = uneven_rows(routed)
    num_columns = min(2, len(rows))
    num_rows = math.ceil(len(rows) / num_columns)
    # Every expert needs its own line of pixels.
    panel_height = max(1.75, 0.35 + 0.016 * loads_SLE.shape[2])
    fig, axes_list = new_fig(num_columns, rows=num_rows, height=0.7 + panel_height * num_rows)
    image = None
    for axes, row in zip(axes_list, rows, strict=False):
        columns_EC = _log_loads(_columns(loads_SLE[:, row])).T
        extent = (steps[0] - 0.5, steps[-1] + 0.5, columns_EC.shape[0] - 0.5, -0.5)
        image = _heat_map(axes, columns_EC, extent)
        axes.set_title(f"Layer {layers[row]}")
        axes.set_ylabel("expert")
        axes.yaxis.set_major_locator(_expert_ticks(loads_SLE.shape[2], most=5))
        _step_ticks(axes, steps[0], steps[-1])
    # With an odd layer count the last row has an empty panel.
    for axes in axes_list[len(rows) :]:
        axes.set_visible(False)
    # The lowest panel in each column labels the axis for those above it.
    for axes in axes_list[max(0, len(rows) - num_columns) : len(rows)]:
        axes.set_xlabel("step")
    assert image is not None
    _add_color_bar(fig, image, axes_list)
    return to_svg(fig, "experts")


@styled
def plot_load_map(routed: Sequence[Record]) -> str:
    """Draw load over mean, expert × layer, for all experts: over the first and the last tenth of the run."""
    routed = whole_records(routed)
    num_recent = max(1, len(routed) // 10)
    layers, loads_SLE = layer_numbers(routed[-1]), _loads(routed)
    spans = [("Last", loads_SLE[-num_recent:], routed[-num_recent:])]
    if len(routed) > num_recent:
        spans.insert(0, ("First", loads_SLE[:num_recent], routed[:num_recent]))
    num_layers, num_experts = loads_SLE.shape[1:]
    fig, axes_list = new_fig(len(spans), height=1.3 + min(4.5, 0.22 * max(num_layers, 3)))
    image = None
    for axes, (name, part_SLE, records) in zip(axes_list, spans, strict=True):
        extent = (-0.5, num_experts - 0.5, num_layers - 0.5, -0.5)
        image = _heat_map(axes, _log_loads(part_SLE.sum(axis=0)), extent)
        first, last = records[0]["step"], records[-1]["step"]
        axes.set_title(f"Step {first:,}")
        if last > first:
            axes.set_title(f"{name} steps: {first:,} to {last:,}")
        axes.set_xlabel("expert")
        axes.set_ylabel("layer")
        axes.xaxis.set_major_locator(_expert_ticks(num_experts, most=12))
        # At most 16 labels: more would overlap.
        shown = range(0, num_layers, math.ceil(num_layers / 16))
        axes.set_yticks(list(shown), [str(layers[row]) for row in shown])
    assert image is not None
    _add_color_bar(fig, image, axes_list)
    return to_svg(fig, "expert-map")


@styled
def plot_balance(routed: Sequence[Record]) -> str | None:
    """Draw violation, entropy, logit size and dropped share over steps, one line per layer; None if none are logged."""
    curves = [(key, title) for key, title in _CURVES if any(record.get(key) for record in routed)]
    if not any(any(record.get("expert_dropped_share") or []) for record in routed):
        curves = [(key, title) for key, title in curves if key != "expert_dropped_share"]
    if not curves:
        return None
    layers, rows = layer_numbers(routed[-1]), uneven_rows(routed)
    num_rows = math.ceil(len(curves) / 2)
    fig, axes_list = new_fig(2, rows=num_rows, height=0.7 + 2.1 * num_rows)
    for axes, (key, title) in zip(axes_list, curves, strict=False):
        for row, color in zip(rows, _LAYER_COLORS, strict=False):
            # Records from earlier releases may lack the key.
            series = Series.of([{"step": r["step"], key: r[key][row]} for r in routed if r.get(key)], key)
            thin_curve(axes, series, color, f"layer {layers[row]}")
        axes.set_title(title)
        finish(axes, "step", "", None)
        if key == "expert_dropped_share":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        # Start the axis at zero, unless values are negative: small changes must not look large.
        if axes.get_ylim()[0] > 0:
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    for axes in axes_list[len(curves) :]:
        axes.set_visible(False)
    # All panels draw the same layers in the same colors, so they share one legend.
    handles, labels = axes_list[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper right", ncols=len(rows))
    return to_svg(fig, "balance")


def _max_over_mean(record: Record, row: int) -> float:
    """Return ``max_over_mean`` for one ``expert_load`` row, even in steps without written counts."""
    if record.get("expert_load"):
        return max_over_mean(record["expert_load"][row])
    # max_violation = max_over_mean − 1 is written in every step.
    return 1 + record["expert_max_violation"][row]


def _loads(routed: Sequence[Record]) -> np.ndarray:
    return np.array([record["expert_load"] for record in routed], dtype=float)


def _columns(loads_SE: np.ndarray) -> np.ndarray:
    """Sum steps in equal groups, to at most ``MAX_COLUMNS`` rows [C, E]."""
    size = math.ceil(len(loads_SE) / MAX_COLUMNS)
    padding = np.zeros((-len(loads_SE) % size, loads_SE.shape[1]))
    # Sums, not means: the colors show load over mean, which is the same for a sum.
    return np.concatenate([loads_SE, padding]).reshape(-1, size, loads_SE.shape[1]).sum(axis=1)


def _log_loads(loads_XE: np.ndarray) -> np.ndarray:
    """Return log2(load / row mean) within ±2; −3 marks an expert without tokens, NaN a row without any."""
    # A row without tokens gives 0 / 0, an expert without tokens log 0: each has its own color.
    with np.errstate(invalid="ignore", divide="ignore"):
        logs_XE = np.log2(loads_XE / loads_XE.mean(axis=1, keepdims=True))
    return np.where(np.isneginf(logs_XE), -3.0, np.clip(logs_XE, -2.0, 2.0))


def _heat_map(axes: Axes, values: np.ndarray, extent: tuple[float, float, float, float]) -> AxesImage:
    color_map = matplotlib.colormaps["RdBu_r"].with_extremes(under="#111111", bad="#888888")
    axes.grid(False)
    return axes.imshow(values, aspect="auto", interpolation="nearest", cmap=color_map, vmin=-2, vmax=2, extent=extent)


def _add_color_bar(fig: Figure, image: AxesImage, axes_list: Sequence[Axes]) -> None:
    ticks = [-2, -1, 0, 1, 2]
    bar = fig.colorbar(
        image, ax=list(axes_list), ticks=ticks, pad=0.015, fraction=0.03, aspect=30, extend="min", extendfrac=0.06
    )
    bar.ax.set_yticklabels(["≤ ¼", "½", "1 even", "2", "≥ 4"])
    bar.set_label("load / mean; black: none")
    outline: Any = bar.outline
    outline.set_visible(False)


def _expert_ticks(num_experts: int, *, most: int) -> MultipleLocator:
    """Place ticks at multiples of a power of two: expert counts and experts per rank are powers of two."""
    return MultipleLocator(2 ** math.ceil(math.log2(max(1, num_experts / most))))


def _step_ticks(axes: Axes, first: int, last: int) -> None:
    """Place ticks at integer steps: every step in a short run, round numbers in a long one."""
    if last - first < 6:
        axes.set_xticks(range(first, last + 1))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))


def _or_zero(value: float) -> float:
    """Return a sort key that treats a layer without tokens as balanced."""
    if math.isnan(value):
        return 0.0
    return value

"""Comparison page: several runs, or several evaluations, side by side in one self-contained file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import FuncFormatter

from launcher.metrics.metrics_console import short_number
from launcher.report.evaluation.evaluation_folder import SETTINGS_FILE, Evaluation, load_evaluation
from launcher.report.evaluation.evaluation_plots import plot_needle_scores
from launcher.report.evaluation.evaluation_tables import Rows, depth_rows, score_rows, tasks_with_depth, write_csv
from launcher.report.html import Section, Table, render_page, write_page
from launcher.report.report_header import key_metrics, state
from launcher.report.report_plots import (
    Series,
    binary_number,
    finish,
    new_fig,
    position_points,
    standalone,
    styled,
    to_svg,
)
from launcher.report.report_run import RunData, load_run
from launcher.wording import format_count
from longctx.errors import ConfigError
from longctx.files import write_atomically

COMPARISON_FILE = "comparison.html"

RUN_COLORS = ("#3b82c4", "#e08a1e", "#3a9d6e", "#d1495b", "#8e6bbf", "#8a8f98", "#b5651d", "#17a2b8")
"""Colours by run number; they repeat after the last one."""
_SAME_TOKENS = 1.005
"""Maximum ratio between runs' bytes per token at which tokenizers count as equal: texts may differ a little."""
_PATHS = ("run.output_dir",)
"""Config keys that differ between any two runs."""


def write_comparison(folders: Sequence[Path], output: Path | str | None = None) -> Path:
    """Write a comparison of these run folders and return its path, by default ``comparison.html`` here.

    Raise ConfigError if a folder is named twice, DataError if a folder is not a run folder.
    """
    names = distinct_names(folders)
    runs = [load_run(folder) for folder in folders]
    return _write(names, "run", comparison_sections(runs, names), output)


def _write(names: Sequence[str], unit: str, parts: Sequence[Section], output: Path | str | None) -> Path:
    state, source = format_count(len(names), unit), f"the {unit}s' folders"
    page = Path(output or COMPARISON_FILE)
    return write_page(lambda: render_page(" · ".join(names), state, parts, source=source), page, COMPARISON_FILE)


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return folder names with as many parents as needed to distinguish them.

    Raise ConfigError if a folder is named twice.
    """
    folders = [folder.resolve() for folder in folders]
    duplicates = [folder for folder in folders if folders.count(folder) > 1]
    if duplicates:
        raise ConfigError(f"{duplicates[0]} is named twice. Name each folder once.")
    length, names = 0, list[str]()
    while len(set(names)) < len(folders):
        length += 1
        names = ["/".join(folder.parts[-length:]) for folder in folders]
    return names


def comparison_sections(runs: Sequence[RunData], names: Sequence[str]) -> list[Section]:
    """Return sections for key metrics, losses over tokens, and config keys that differ."""
    caption = "No step has been logged yet."
    scales = bits_of_nats(runs)
    plot = plot_run_losses(runs, names, scales)
    if plot is not None:
        caption = "Lines are training losses, smoothed; dots are validations."
    # Losses per token do not compare across tokenizers; losses per byte do.
    if plot is not None and scales is not None:
        caption += " In bits per byte of validation text, because the runs' tokenizers differ."
    positions = []
    if (by_position := plot_position_losses(runs, names)) is not None:
        of_last = "Each run's last validation, in nats per token of its own tokenizer."
        positions.append(Section(title="Loss by position", caption=of_last, plot=by_position))
    rows = differences(runs)
    caption_diff = "Config keys that differ; – if a run lacks one."
    if not rows:
        caption_diff = "The configs are identical, except for the folders."
    return [
        Section(title="Side by side", caption="", table=metric_table(runs, names)),
        Section(title="Loss", caption=caption, plot=plot),
        *positions,
        Section(title="What differs", caption=caption_diff, table=Table(column_names=("Key", *names), rows=rows)),
    ]


def metric_table(runs: Sequence[RunData], names: Sequence[str]) -> Table:
    """Return a table with one key metric per row; – if a run lacks it."""
    by_run = [{metric.label: metric.value for metric in key_metrics(run)} for run in runs]
    # Keep a report's order; a run may have metrics that another lacks.
    labels = list(dict.fromkeys(label for found in by_run for label in found))
    rows = [("State", *(state(run) for run in runs))]
    rows += [(label, *(found.get(label, "–") for found in by_run)) for label in labels]
    return Table(column_names=("", *names), rows=rows)


def differences(runs: Sequence[RunData]) -> list[tuple[str, ...]]:
    """Return config keys with different values across runs, and their values."""
    configs = [dict(_flatten(run.config)) for run in runs]
    rows: list[tuple[str, ...]] = []
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [_plain(config[key]) if key in config else "–" for config in configs]
        if key not in _PATHS and len(set(values)) > 1:
            rows.append((key, *values))
    return rows


@styled
def plot_run_losses(
    runs: Sequence[RunData], names: Sequence[str], scales: Sequence[float] | None = None
) -> Markup | None:
    """Draw smoothed training losses and validation losses over tokens; None without losses.

    ``scales`` converts each run's nats per token to bits per byte.
    """
    fig, (axes,) = new_fig(1, height=3.9)
    plotted, factors = [], scales or [1.0] * len(runs)
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        color, label = RUN_COLORS[number % len(RUN_COLORS)], name
        for records, style in ((run.train, "-"), (run.validation_records, "o--")):
            loss = Series.of(records, "loss")
            if not loss.drawable:
                continue
            plotted.append(loss)
            # Smooth before thinning: the running mean needs every step.
            if style == "-":
                loss = loss.smoothed().thinned()
            points = _over_tokens(run, loss)
            axes.plot(points.steps, factors[number] * points.values, style, color=color, markersize=4, label=label)
            # One legend entry per run.
            label = None
    if not plotted:
        return None
    if scales is None:
        finish(axes, "tokens", "loss (nats per token)", plotted[0])
    else:
        finish(axes, "tokens", "loss (bits per byte)", None)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    axes.legend(loc="upper right")
    return Markup(to_svg(fig, "loss"))


def bits_of_nats(runs: Sequence[RunData]) -> list[float] | None:
    """Return each run's factor from nats per token to bits per byte; None if all are equal or one is unknown."""
    found = []
    for run in runs:
        # Loss and bits per byte are the same quantity in two units, so their ratio is the factor.
        known = [r for r in run.validation_records if r.get("bits_per_byte") and r["loss"]]
        if not known:
            return None
        found.append(known[-1]["bits_per_byte"] / known[-1]["loss"])
    if max(found) <= _SAME_TOKENS * min(found):
        return None
    return found


@styled
def plot_position_losses(runs: Sequence[RunData], names: Sequence[str]) -> Markup | None:
    """Draw loss by position from each run's last validation; None if no run has it."""
    fig, (axes,) = new_fig(1, height=3.4)
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        if run.validation_records and run.validation_records[-1].get("loss_by_position"):
            middles, losses = position_points(run.validation_records[-1])
            axes.plot(middles, losses, "o-", color=RUN_COLORS[number % len(RUN_COLORS)], markersize=3, label=name)
    if not axes.lines:
        return None
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: binary_number(value)))
    axes.set_xlabel("position in the document, counted from 1 (tokens, log scale)")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(loc="best")
    return Markup(to_svg(fig, "positions"))


def _over_tokens(run: RunData, series: Series) -> Series:
    """Resample a series from the run's steps to its tokens; empty if no record has tokens."""
    known = Series.of(run.train, "tokens")
    if not known.drawable:
        return Series(steps=np.empty(0), values=np.empty(0))
    # Step 0 has read 0 tokens: interpolation needs this point for early validations.
    steps, tokens = np.append(0.0, known.steps), np.append(0.0, known.values)
    return Series(steps=np.interp(series.steps, steps, tokens), values=series.values)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Flatten nested mappings to ordered (dotted key, value) pairs: ``{"a": {"b": 1}} -> [("a.b", 1)]``."""
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            pairs.extend(_flatten(value, f"{prefix}{key}."))
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs


def _plain(value: Any) -> str:
    """Format a config value: plain lists with commas, deeper values as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(not isinstance(item, list | dict) for item in value):
        return ", ".join(str(item) for item in value)
    return json.dumps(value, ensure_ascii=False)


# Several evaluations: needle panels on one scale, and scores by length as a table.


def is_evaluation(folder: Path) -> bool:
    """Return True if ``evaluate`` wrote the folder."""
    return (folder / SETTINGS_FILE).is_file()


def write_evaluations(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write a comparison of these evaluations and return its path, by default ``comparison.html`` here.

    Plots and their data are also written as files next to it. Raise ConfigError if a folder is named twice, or if the
    evaluations have no task with depth in common; DataError if a folder is not an evaluation.
    """
    names = distinct_names(folders)
    evaluations = [load_evaluation(folder) for folder in folders]
    tasks = common_tasks(evaluations)
    if not tasks:
        raise ConfigError(f"{', '.join(names)} have no common task with depths, so there is nothing to plot.")
    page = Path(output or COMPARISON_FILE)
    # Scores first: a task without depth has no plot.
    parts = [_score_section(evaluations, names)]
    for task in tasks:
        rows = panel_rows(evaluations, names, task)
        plot = _needle_plot(evaluations, names, task)
        # Separate files: a plot may be shared without its page.
        plot_file = page.with_name(f"{page.stem}_{task}.svg")
        write_atomically(plot_file, standalone(plot).encode())
        write_csv(plot_file.with_suffix(".csv"), rows)
        caption = "The scale is fixed from 0 to 1; n is the sample count; untested cells are blank."
        parts.append(Section(title=f"{task} by length and depth", caption=caption, plot=Markup(plot)))
    return _write(names, "evaluation", parts, output)


def common_tasks(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return tasks with depth that all evaluations have in common."""
    first, *others = [tasks_with_depth(evaluation) for evaluation in evaluations]
    return [task for task in first if all(task in tasks for tasks in others)]


def panel_rows(evaluations: Sequence[Evaluation], names: Sequence[str], task: str) -> Rows:
    """Return the data for a task's panels, each row with its evaluation's name."""
    return [
        {"evaluation": name, **row}
        for evaluation, name in zip(evaluations, names, strict=True)
        for row in depth_rows(evaluation, task)
    ]


def _needle_plot(evaluations: Sequence[Evaluation], names: Sequence[str], task: str) -> str:
    subplots = [(name, depth_rows(evaluation, task)) for name, evaluation in zip(names, evaluations, strict=True)]
    lengths = sorted({row["length"] for _, rows in subplots for row in rows})
    # One caption line per evaluation: models, dates and sample counts may all differ.
    parts = []
    for evaluation, (name, rows) in zip(evaluations, subplots, strict=True):
        count = format_count(sum(row["n"] for row in rows), "sample")
        parts.append(f"{name}: {evaluation.caption}, n = {count}")
    caption = f"{task} · lengths {lengths[0]:,} to {lengths[-1]:,}\n" + "\n".join(parts)
    return plot_needle_scores(subplots, caption, re.sub(r"[^A-Za-z0-9]", "-", f"panels-{task}"))


def _score_section(evaluations: Sequence[Evaluation], names: Sequence[str]) -> Section:
    """Return a table with one row per task and evaluation, and one column per length."""
    found = [score_rows(evaluation) for evaluation in evaluations]
    lengths = sorted({row["length"] for rows in found for row in rows})
    tasks = list(dict.fromkeys(row["task"] for rows in found for row in rows))
    lines = []
    for task in tasks:
        for name, rows in zip(names, found, strict=True):
            cells = {row["length"]: f"{row['mean']:.3f}, n={row['n']}" for row in rows if row["task"] == task}
            lines.append((task, name, *(cells.get(length, "–") for length in lengths)))
    column_names = ("Task", "Evaluation", *(f"{length:,}" for length in lengths))
    return Section(title="Scores by length", caption="Mean score.", table=Table(column_names=column_names, rows=lines))

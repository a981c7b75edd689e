"""Comparison page for runs or evaluations, one self-contained HTML file.

Several runs: key metrics, losses over tokens, and the config keys that differ. Several evaluations: scores by length,
and needle results as panels on one scale.
"""

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
from launcher.report.html import Section, Table, page_path, render_page, write_page
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
"""Line colors in the order of runs; they repeat after the last one."""
_SAME_TOKENIZER_RATIO = 1.005
"""Runs whose bytes per token differ by at most this ratio count as having one tokenizer: validation texts may differ a
little."""
_IGNORED_KEYS = ("run.output_dir",)
"""Config keys that differ between any two runs."""


def write_comparison(folders: Sequence[Path], output: Path | str | None = None) -> Path:
    """Write a page that compares these run folders, and return its path.

    ``output`` is a file, or a folder for ``comparison.html``; by default that file in the working folder. Raise
    ConfigError if a folder is listed twice, DataError if a folder is not a run folder.
    """
    names = distinct_names(folders)
    runs = [load_run(folder) for folder in folders]
    return _write(names, "run", comparison_sections(runs, names), output)


def _write(names: Sequence[str], unit: str, sections: Sequence[Section], output: Path | str | None) -> Path:
    """Render and write the page; ``unit`` is "run" or "evaluation"."""
    title, subtitle, source = " · ".join(names), format_count(len(names), unit), f"the {unit}s' folders"
    page = Path(output or COMPARISON_FILE)
    return write_page(lambda: render_page(title, subtitle, sections, source=source), page, COMPARISON_FILE)


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return a name per folder: its last path components, for all folders as many as are needed to distinguish them.

    Raise ConfigError if a folder is listed twice.
    """
    folders = [folder.resolve() for folder in folders]
    duplicates = [folder for folder in folders if folders.count(folder) > 1]
    if duplicates:
        raise ConfigError(f"{duplicates[0]} is named twice. Name each folder once.")
    # Ends at the latest with full paths, which differ.
    num_parts = 0
    names: list[str] = []
    while len(set(names)) < len(folders):
        num_parts += 1
        names = ["/".join(folder.parts[-num_parts:]) for folder in folders]
    return names


def comparison_sections(runs: Sequence[RunData], names: Sequence[str]) -> list[Section]:
    """Return sections for key metrics, losses over tokens, any losses by position, and config keys that differ."""
    sections = [Section(title="Side by side", caption="", table=metric_table(runs, names))]

    # Losses per token do not compare across tokenizers; losses per byte do.
    factors = bits_per_byte_factors(runs)
    loss_plot = plot_run_losses(runs, names, factors)
    caption = "No step has been logged yet."
    if loss_plot is not None:
        caption = "Lines are training losses, smoothed; dots are validations."
    if loss_plot is not None and factors is not None:
        caption += " In bits per byte of validation text, because the runs' tokenizers differ."
    sections.append(Section(title="Loss", caption=caption, plot=loss_plot))

    position_plot = plot_position_losses(runs, names)
    if position_plot is not None:
        caption = "Each run's last validation, in nats per token of its own tokenizer."
        sections.append(Section(title="Loss by position", caption=caption, plot=position_plot))

    rows = config_differences(runs)
    caption = "Config keys that differ; – if a run lacks one."
    if not rows:
        caption = "The configs are identical, except for the output folders."
    table = Table(column_names=("Key", *names), rows=rows)
    sections.append(Section(title="What differs", caption=caption, table=table))
    return sections


def metric_table(runs: Sequence[RunData], names: Sequence[str]) -> Table:
    """Return a table with one column per run, and rows for its state and each key metric; – if a run lacks it."""
    by_run = [{metric.label: metric.value for metric in key_metrics(run)} for run in runs]
    # The order is that of a single run's report; a run may have metrics that another lacks.
    labels = list(dict.fromkeys(label for metrics in by_run for label in metrics))
    rows = [("State", *(state(run) for run in runs))]
    rows += [(label, *(metrics.get(label, "–") for metrics in by_run)) for label in labels]
    return Table(column_names=("", *names), rows=rows)


def config_differences(runs: Sequence[RunData]) -> list[tuple[str, ...]]:
    """Return a row per config key whose value is not the same in all runs: the dotted key, then each run's value.

    – marks a config without the key.
    """
    configs = [dict(_flatten(run.config)) for run in runs]
    rows: list[tuple[str, ...]] = []
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [_plain(config[key]) if key in config else "–" for config in configs]
        if key not in _IGNORED_KEYS and len(set(values)) > 1:
            rows.append((key, *values))
    return rows


@styled
def plot_run_losses(
    runs: Sequence[RunData], names: Sequence[str], scales: Sequence[float] | None = None
) -> Markup | None:
    """Draw smoothed training losses and validation losses over tokens; None if no run has a finite loss.

    ``scales`` has each run's factor from nats per token to bits per byte (``bits_per_byte_factors``); None draws nats
    per token.
    """
    fig, (axes,) = new_fig(1, height=3.9)
    plotted, factors = [], scales or [1.0] * len(runs)
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        color, label = RUN_COLORS[number % len(RUN_COLORS)], name
        for records, style, is_train in ((run.train, "-", True), (run.validation_records, "o--", False)):
            loss = Series.of(records, "loss")
            if not loss.drawable:
                continue
            plotted.append(loss)
            # Smooth before thinning: the running mean needs every step.
            if is_train:
                loss = loss.smoothed().thinned()
            # Over tokens, not steps: runs may have different batch sizes.
            loss = _over_tokens(run, loss)
            axes.plot(loss.steps, factors[number] * loss.values, style, color=color, markersize=4, label=label)
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


def bits_per_byte_factors(runs: Sequence[RunData]) -> list[float] | None:
    """Return each run's factor from nats per token to bits per byte, to compare losses across tokenizers.

    None if nats per token compare already, because all factors are equal, or if a factor is unknown.
    """
    factors = []
    for run in runs:
        # Loss and bits per byte are the same quantity in two units, so their ratio is the factor.
        known = [r for r in run.validation_records if r.get("bits_per_byte") and r["loss"]]
        if not known:
            return None
        factors.append(known[-1]["bits_per_byte"] / known[-1]["loss"])
    if max(factors) <= _SAME_TOKENIZER_RATIO * min(factors):
        return None
    return factors


@styled
def plot_position_losses(runs: Sequence[RunData], names: Sequence[str]) -> Markup | None:
    """Draw loss by document position from each run's last validation, in nats per token; None if no run has it."""
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
    """Return the series with tokens consumed in place of ``steps``, interpolated; empty if no record has tokens."""
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


def write_evaluation_comparison(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write a page that compares these evaluation folders, and return its path, by default ``comparison.html`` here.

    Each task's plot and data are also written next to it, as ``comparison_TASK.svg`` and ``.csv``. Raise ConfigError if
    a folder is listed twice, or if the evaluations have no task with depth in common; DataError if a folder is not an
    evaluation.
    """
    names = distinct_names(folders)
    evaluations = [load_evaluation(folder) for folder in folders]
    tasks = common_tasks(evaluations)
    if not tasks:
        raise ConfigError(f"{', '.join(names)} have no common task with depths, so there is nothing to plot.")
    page = page_path(Path(output or COMPARISON_FILE), COMPARISON_FILE)
    # Start with scores by length, which include tasks without depth: these have no plot.
    sections = [_score_section(evaluations, names)]
    for task in tasks:
        plot = _needle_plot(evaluations, names, task)
        # Separate files: a plot may be shared without its page.
        plot_file = page.with_name(f"{page.stem}_{task}.svg")
        write_atomically(plot_file, standalone(plot).encode())
        write_csv(plot_file.with_suffix(".csv"), panel_rows(evaluations, names, task))
        caption = "The scale is fixed from 0 to 1; n is the sample count; untested cells are blank."
        sections.append(Section(title=f"{task} by length and depth", caption=caption, plot=Markup(plot)))
    return _write(names, "evaluation", sections, output)


def common_tasks(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the tasks that all evaluations score by depth, in the first one's order."""
    first, *others = [tasks_with_depth(evaluation) for evaluation in evaluations]
    return [task for task in first if all(task in tasks for tasks in others)]


def panel_rows(evaluations: Sequence[Evaluation], names: Sequence[str], task: str) -> Rows:
    """Return the data in a task's plot: one row per evaluation, length and depth."""
    return [
        {"evaluation": name, **row}
        for evaluation, name in zip(evaluations, names, strict=True)
        for row in depth_rows(evaluation, task)
    ]


def _needle_plot(evaluations: Sequence[Evaluation], names: Sequence[str], task: str) -> str:
    """Draw a task's scores by length and depth, one panel per evaluation; return the SVG."""
    subplots = [(name, depth_rows(evaluation, task)) for name, evaluation in zip(names, evaluations, strict=True)]
    lengths = sorted({row["length"] for _, rows in subplots for row in rows})
    # One caption line per evaluation: models, dates and sample counts may all differ.
    lines = []
    for evaluation, (name, rows) in zip(evaluations, subplots, strict=True):
        count = format_count(sum(row["n"] for row in rows), "sample")
        lines.append(f"{name}: {evaluation.caption}, n = {count}")
    caption = f"{task} · lengths {lengths[0]:,} to {lengths[-1]:,}\n" + "\n".join(lines)
    return plot_needle_scores(subplots, caption, re.sub(r"[^A-Za-z0-9]", "-", f"panels-{task}"))


def _score_section(evaluations: Sequence[Evaluation], names: Sequence[str]) -> Section:
    """Return mean scores: one row per task and evaluation, one column per length in tokens; – if not tested."""
    scores = [score_rows(evaluation) for evaluation in evaluations]
    lengths = sorted({row["length"] for rows in scores for row in rows})
    tasks = list(dict.fromkeys(row["task"] for rows in scores for row in rows))
    table_rows = []
    for task in tasks:
        for name, rows in zip(names, scores, strict=True):
            cells = {row["length"]: f"{row['mean']:.3f}, n={row['n']}" for row in rows if row["task"] == task}
            table_rows.append((task, name, *(cells.get(length, "–") for length in lengths)))
    column_names = ("Task", "Evaluation", *(f"{length:,}" for length in lengths))
    table = Table(column_names=column_names, rows=table_rows)
    return Section(title="Scores by length", caption="Mean score.", table=table)

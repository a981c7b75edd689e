"""Evaluation output: JSON, CSV, plots, and a page or a part of the run's page."""

from __future__ import annotations

import json
from pathlib import Path

from launcher.metrics.record import METRICS_FILE
from launcher.report.evaluation.evaluation_folder import SUMMARY_FILE, Evaluation, load_evaluation
from launcher.report.evaluation.evaluation_sections import EvaluationPlot, evaluation_plots, evaluation_sections
from launcher.report.evaluation.evaluation_tables import (
    area_rows,
    loss_rows,
    sample_score_rows,
    score_rows,
    summary_of,
    write_csv,
)
from launcher.report.html import KeyMetric, render_page, write_page
from launcher.report.page import REPORT_FILE, write_report
from launcher.report.report_plots import standalone
from launcher.run_folder import CONFIG_FILE
from longctx.files import write_atomically

TABLES = {
    "samples": sample_score_rows,
    "scores": score_rows,
    "areas": area_rows,
    "losses": loss_rows,
}
"""CSV files by name, in addition to those for the plots."""


def write_results(folder: Path) -> Path:
    """Write every table and plot from the folder's rows; return the page that shows them."""
    evaluation = load_evaluation(folder)
    summary = json.dumps(summary_of(evaluation), indent=1, ensure_ascii=False)
    write_atomically(folder / SUMMARY_FILE, f"{summary}\n".encode())
    for name, make in TABLES.items():
        rows = make(evaluation)
        if rows:
            write_csv(folder / f"{name}.csv", rows)
    # Draw once: the files and the page share the SVGs.
    plots = evaluation_plots(evaluation)
    for plot in plots:
        _write_plot(folder, plot)
    run = run_above(folder)
    # Inside a run folder, the run's report shows the evaluation.
    if run is not None:
        return write_report(run)
    return write_page(lambda: _page(evaluation, plots), folder / REPORT_FILE, REPORT_FILE)


def run_above(folder: Path) -> Path | None:
    """Return the run folder one or two levels above an evaluation, which reports it; None outside a run."""
    for parent in list(folder.resolve().parents)[:2]:
        if (parent / CONFIG_FILE).is_file() and (parent / METRICS_FILE).is_file():
            return parent
    return None


def _write_plot(folder: Path, plot: EvaluationPlot) -> None:
    write_atomically(folder / f"{plot.name}.svg", standalone(plot.svg).encode())
    write_csv(folder / f"{plot.name}.csv", plot.rows)
    for name, rows in plot.extra_tables:
        if rows:
            write_csv(folder / f"{name}.csv", rows)


def _page(evaluation: Evaluation, plots: list[EvaluationPlot]) -> str:
    metrics = [
        KeyMetric(label=row["task"], value=f"{row['mean']:.3f}", note=f"area, {row['low']:.3f} to {row['high']:.3f}")
        for row in area_rows(evaluation)[-1:]
    ]
    return render_page(
        evaluation.settings["model"],
        f"evaluated {evaluation.settings['date']}",
        evaluation_sections(evaluation, plots),
        source="the evaluation folder's files",
        metrics=metrics,
    )

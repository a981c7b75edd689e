"""An evaluation as page sections, with its plots and tables, which are also written as files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from launcher.report.evaluation.evaluation_folder import Evaluation
from launcher.report.evaluation.evaluation_plots import (
    plot_length_scores,
    plot_loss_bins,
    plot_needle_scores,
    plot_ruler_scores,
    with_interval,
)
from launcher.report.evaluation.evaluation_tables import (
    Rows,
    area_rows,
    bin_rows,
    depth_rows,
    loss_rows,
    ruler_rows,
    score_rows,
    tasks_with_depth,
)
from launcher.report.html import Section, Table
from launcher.wording import format_count


@dataclass(frozen=True, kw_only=True)
class EvaluationPlot:
    """SVG with its source rows, and its title and caption on a page."""

    name: str
    """Base name of its files."""
    title: str
    caption: str
    svg: str
    rows: Rows
    """Rows in the CSV file next to the SVG."""
    extra_tables: tuple[tuple[str, Rows], ...] = ()
    """Further CSV files, by name."""


def evaluation_plots(evaluation: Evaluation) -> list[EvaluationPlot]:
    """Return all plots for which the evaluation has data."""
    # Heat maps first: they show at which depths in a text the model finds the answer.
    found = [_needle_plot(evaluation, task) for task in tasks_with_depth(evaluation)]
    scores, areas = score_rows(evaluation), area_rows(evaluation)
    if scores:
        caption = _caption(evaluation, scores, format_count(sum(row["n"] for row in scores), "sample"))
        found.append(
            EvaluationPlot(
                name="score_over_length",
                title="score over length",
                caption="Area under the score over log length, divided by the range.",
                svg=plot_length_scores(scores, areas, caption, _name(evaluation, "length")),
                rows=scores,
                extra_tables=(("areas", areas),),
            )
        )
    ruler = ruler_rows(evaluation)
    if ruler:
        found.append(_ruler_plot(evaluation, ruler))
    texts = [row for row in bin_rows(evaluation, "by_position") if row["task"] == "ppl"]
    if texts:
        distance_rows = bin_rows(evaluation, "by_distance")
        read = sum(row["tokens_read"] for row in loss_rows(evaluation) if row["task"] == "ppl")
        caption = _caption(evaluation, texts, f"{read:,} tokens")
        found.append(
            EvaluationPlot(
                name="loss_by_position",
                title="loss by position and distance",
                caption="Token-weighted; bands are 95 % intervals over texts.",
                svg=plot_loss_bins(texts, distance_rows, caption, _name(evaluation, "loss")),
                rows=texts,
                extra_tables=(("loss_by_distance", distance_rows),),
            )
        )
    return found


def evaluation_sections(evaluation: Evaluation, plots: Sequence[EvaluationPlot] | None = None) -> list[Section]:
    """Return page sections: tables, then plots. ``plots`` reuses plots that are already drawn."""
    if plots is None:
        plots = evaluation_plots(evaluation)
    # Put the name in every title: a run's page may show several evaluations.
    name = evaluation.folder.resolve().name
    title = f"Evaluation {name}"
    scores = score_rows(evaluation)
    if not scores and not evaluation.losses:
        return [Section(title=title, caption="No sample has been measured yet.")]
    parts = []
    if scores:
        caption = f"{evaluation.caption}. Mean score, 95 % interval and sample count."
        parts.append(Section(title=title, caption=caption, table=_score_table(scores, area_rows(evaluation))))
    failed = _first_failures(evaluation)
    if failed:
        caption = (
            "Each task's first sample below its best score, which often shows if the model or the prompt's form is "
            "wrong."
        )
        table = Table(column_names=["Task, length", "Prompt, expected answer, output"], rows=failed, has_text=True)
        parts.append(Section(title=f"{name}: failed samples", caption=caption, table=table))
    losses = loss_rows(evaluation)
    if losses:
        caption = f"{evaluation.caption}. longppl is the perplexity on tokens that need distant context."
        parts.append(Section(title=f"{name}: perplexity", caption=caption, table=_loss_table(losses)))
    return parts + [
        Section(title=f"{name}: {plot.title}", caption=plot.caption, plot=Markup(plot.svg)) for plot in plots
    ]


def _first_failures(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Return (task and length, prompt with expected answer and output) for each task's first failed sample."""
    found: dict[str, tuple[str, str]] = {}
    for row in evaluation.scores:
        # Only samples that score below 1 store an excerpt.
        if row.excerpt and row.task not in found:
            where = f"{row.task}, {row.length:,}"
            if row.depth is not None:
                where += f", depth {row.depth:g}"
            text = f"{row.excerpt}\n\nwanted: {' | '.join(row.answers)}\noutput: {row.output.strip() or '(nothing)'}"
            found[row.task] = (where, text)
    return list(found.values())


def _ruler_plot(evaluation: Evaluation, rows: Rows) -> EvaluationPlot:
    scores = [row for row in score_rows(evaluation) if row["task"].startswith("ruler_")]
    counts = sorted({row["n"] for row in scores})
    n = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    caption = _caption(evaluation, scores, f"{n} samples per task and length")
    return EvaluationPlot(
        name="ruler",
        title="RULER by length",
        caption="NVIDIA's prompts and scores, in per cent; NVIDIA uses 500 samples and other essays.",
        svg=plot_ruler_scores(rows, caption, _name(evaluation, "ruler")),
        rows=rows,
    )


def _needle_plot(evaluation: Evaluation, task: str) -> EvaluationPlot:
    rows = depth_rows(evaluation, task)
    caption = _caption(evaluation, rows, format_count(sum(row["n"] for row in rows), "sample"))
    return EvaluationPlot(
        name=f"depth_{task}",
        title=f"{task} by length and depth",
        caption="The scale is fixed from 0 to 1; n is the sample count; untested cells are blank.",
        svg=plot_needle_scores([("", rows)], f"{task}: {caption}", _name(evaluation, task)),
        rows=rows,
    )


def _name(evaluation: Evaluation, plot_name: str) -> str:
    """Return a name for a plot's ids, unique because a run's page may show several evaluations."""
    return re.sub(r"[^A-Za-z0-9]", "-", "-".join((*evaluation.folder.resolve().parts[-2:], plot_name)))


def _caption(evaluation: Evaluation, rows: Rows, count: str) -> str:
    lengths = sorted({row["length"] for row in rows})
    span = f"length {lengths[0]:,}"
    if len(lengths) > 1:
        span = f"lengths {lengths[0]:,} to {lengths[-1]:,}"
    return f"{evaluation.settings['model']} · {span} · {evaluation.settings['date']} · n = {count}"


def _score_table(scores: Rows, areas: Rows) -> Table:
    lengths = sorted({row["length"] for row in scores})
    cells = {(row["task"], row["length"]): f"{with_interval(row)}, n={row['n']}" for row in scores}
    rows = []
    for area in areas:
        row = [cells.get((area["task"], length), "") for length in lengths]
        rows.append([area["task"], *row, with_interval(area)])
    column_names = [f"{length:,}" for length in lengths]
    return Table(column_names=["Task", *column_names, "Area over lengths"], rows=rows)


def _loss_table(losses: Rows) -> Table:
    rows = []
    for row in losses:
        perplexity, loss = "–", "–"
        if row["loss"] is not None:
            perplexity, loss = f"{row['perplexity']:.4g}", f"{row['loss']:.4f}"
        # A single text has no interval.
        if row["low"] is not None:
            loss += f" ({row['low']:.4f} to {row['high']:.4f})"
        counts = f"{row['tokens']:,} of {row['tokens_read']:,}"
        rows.append((row["task"], f"{row['length']:,}", perplexity, loss, counts, f"{row['texts']:,}"))
    return Table(column_names=("Measure", "Length", "Perplexity", "Loss, nats per token", "Tokens", "Texts"), rows=rows)

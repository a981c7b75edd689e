"""Run report: a run folder as one self-contained ``report.html``, to read, keep or send.

No server, no network, no script: plots are inline SVG. All content comes from files in the run folder, so a report can
be made at any time, even during the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from launcher.metrics.expert_load import DEAD_AFTER_STEPS
from launcher.metrics.goodput.account import KINDS, Goodput, effective_share
from launcher.metrics.record import Record
from launcher.report import expert_report, report_plots
from launcher.report.audits import audit_sections
from launcher.report.evaluation.evaluation_sections import evaluation_sections
from launcher.report.html import Section, Table, render_page, write_page
from launcher.report.report_header import completed_share, key_metrics, run_warnings, state
from launcher.report.report_run import RunData, load_run
from launcher.report.report_text import duration, format_number, known, perplexity
from launcher.wording import first_names, format_count

REPORT_FILE = "report.html"

MAX_VALIDATION_ROWS = 12
"""Maximum rows in the validation table; a longer list shows the first, the last and some between."""
MAX_SAMPLES = 6
"""Maximum sample texts, selected in the same way."""


def write_report(run_folder: Path | str, output: Path | str | None = None) -> Path:
    """Write a run folder's report and return its path (``report.html`` in the folder unless ``output`` is given).

    Raise DataError if it is not a run folder or a file in it is damaged. An older report is replaced atomically.
    """
    folder = Path(run_folder)
    run = load_run(folder)
    return write_page(lambda: render_report(run), Path(output or folder / REPORT_FILE), REPORT_FILE)


def render_report(run: RunData) -> str:
    """Return the run's page as text."""
    return render_page(
        run.name,
        state(run),
        report_sections(run),
        source="this run folder's files",
        progress=completed_share(run),
        metrics=key_metrics(run),
        warnings=run_warnings(run),
    )


# Page sections.


def report_sections(run: RunData) -> list[Section]:
    """Return all sections in display order; a section without data says so."""
    parts = audit_sections(run.audits)
    parts += [_loss_section(run), *_validation_sections(run), _position_section(run), _speed_section(run)]
    parts += goodput_section(run.goodput) + _expert_sections(run)
    for evaluation in run.evaluations:
        parts += evaluation_sections(evaluation)
    return parts + [Section(title="Evaluation", caption=reason) for reason in run.evaluation_errors]


def _loss_section(run: RunData) -> Section:
    if not run.train and not run.validation_records:
        return Section(title="Loss", caption="No step has been logged yet.")
    caption = "The run has no validation yet to compare the training loss with."
    if any(record.get("unigram_entropy") is not None for record in run.validation_records):
        caption = "The dashed line is the loss when predicting by token frequency alone."
    plot = report_plots.plot_losses(
        run.train, run.validation_records, run.resumed_steps, [event["step"] for event in run.audits]
    )
    if any(record.get("tokens") for record in run.train):
        caption += " The upper axis counts tokens."
    return Section(title="Loss", caption=caption, plot=Markup(plot))


def _validation_sections(run: RunData) -> list[Section]:
    """Return a validation table and sample texts."""
    parts = []
    if run.validation_records:
        rows = [_validation_row(record, run) for record in sample_evenly(run.validation_records, MAX_VALIDATION_ROWS)]
        column_names = ("Step", "Tokens read", "Loss", "Perplexity", "Bits per byte", "Below unigram entropy")
        table = Table(column_names=column_names, rows=rows)
        parts.append(Section(title="Validations", caption="Loss in nats per token.", table=table))
    sampled = [record for record in run.validation_records if record.get("sample")]
    if sampled:
        # An empty prompt is not shown.
        caption = "Greedy decoding with that step's weights."
        prompt = sampled[-1]["sample"]["prompt"]
        if prompt:
            caption = f"Greedy decoding with that step's weights, after {prompt!r}."
        rows = [(f"{record['step']:,}", record["sample"]["text"]) for record in sample_evenly(sampled, MAX_SAMPLES)]
        table = Table(column_names=("Step", "Text"), rows=rows, has_text=True)
        parts.append(Section(title="Sample text", caption=caption, table=table))
    return parts


def _validation_row(record: Record, run: RunData) -> tuple[str, ...]:
    """Return one validation's row; unknown values are dashes."""
    loss, entropy, tokens = record["loss"], record.get("unigram_entropy"), run.tokens_at(record["step"])
    cells = ["–", "–", "–"]
    if tokens is not None:
        cells[0] = f"{tokens:,}"
    if loss is not None:
        cells[1] = perplexity(loss)
    if loss is not None and entropy is not None:
        cells[2] = format_number(entropy - loss)
    return (
        f"{record['step']:,}",
        cells[0],
        format_number(loss),
        cells[1],
        format_number(record.get("bits_per_byte")),
        cells[2],
    )


def sample_evenly(records: Sequence[Record], most: int) -> list[Record]:
    """Return at most ``most`` records: first, last, and others evenly spaced between them."""
    if len(records) <= most:
        return list(records)
    return [records[round(index * (len(records) - 1) / (most - 1))] for index in range(most)]


def _position_section(run: RunData) -> Section:
    title = "Loss by position"
    measured = [record for record in run.validation_records if record.get("loss_by_position")]
    if not run.validation_records:
        return Section(title=title, caption="No validation has been run yet.")
    if not measured:
        return Section(title=title, caption="The validations did not record it.")
    # A single validation shows no progress to draw.
    first = None
    if len(measured) > 1:
        first = measured[0]
    caption = (
        "A model that uses its context predicts a document's later tokens better: the curve falls to the right, as "
        "far as the context helps."
    )
    return Section(title=title, caption=caption, plot=Markup(report_plots.plot_position_loss(first, measured[-1])))


def _speed_section(run: RunData) -> Section:
    title = "Speed and memory"
    if not known(run.train, "tokens_per_second"):
        return Section(title=title, caption="No step has been timed yet.")
    waits, seconds = sum(known(run.train, "data_wait_seconds")), sum(known(run.train, "step_seconds"))
    caption = "Model FLOPs exclude recomputation."
    if seconds:
        caption = f"{waits / seconds:.1%} of the step time was spent waiting for data. {caption}"
    if not known(run.train, "mfu"):
        caption += " MFU is missing: the device's peak rate is unknown."
    return Section(title=title, caption=caption, plot=Markup(report_plots.plot_speed(run.train, run.resumed_steps)))


def goodput_section(goodput: Goodput) -> list[Section]:
    """Return a table with seconds by kind; empty for a run without a timeline."""
    seconds = goodput.seconds()
    share = effective_share(seconds)
    if share is None:
        return []
    total_seconds = sum(seconds.values()) - seconds["paused"]
    caption = (
        f"{share:.1%} of {duration(total_seconds)} trained the current state; {format_count(goodput.stalls, 'step')} "
        "stalled. Pauses do not count."
    )
    if goodput.skewed:
        caption += (
            f" Clocks disagree: {format_count(goodput.skewed, 'attempt')} began before the previous one had ended, "
            "and that time counts as 0."
        )
    rows = []
    for kind, description in KINDS.items():
        # Shares exclude pauses, as the effective training time does.
        share_text = "–" if kind == "paused" else f"{seconds[kind] / total_seconds:.2%}"
        if seconds[kind] > 0:
            rows.append((kind.replace("_", " "), duration(seconds[kind]), share_text, description))
    table = Table(column_names=("", "Time", "Share", ""), rows=rows)
    return [Section(title="Stalls and lost time", caption=caption, table=table)]


def _expert_sections(run: RunData) -> list[Section]:
    """Return load over time, load by layer, and router statistics if logged."""
    routed = expert_report.routed_records(run.train)
    if not run.train:
        return [Section(title="Expert load", caption="No step has been logged yet.")]
    if not routed:
        return [Section(title="Expert load", caption="The model is dense: it has no experts to balance.")]
    caption = (
        "Tokens per expert over the layer's mean: 1 is even, red is busier, blue is less busy, black received no "
        "tokens."
    )
    shown, num_layers = expert_report.uneven_rows(routed), len(expert_report.whole_records(routed)[-1]["expert_load"])
    if len(shown) < num_layers:
        caption += (
            f" The plots show the {len(shown)} least even of {num_layers} layers; the map below and the table include "
            "all."
        )
    column_names, rows = expert_report.expert_table(routed)
    over_time = Section(
        title="Expert load",
        caption=caption,
        plot=Markup(expert_report.plot_expert_loads(routed)),
        table=Table(column_names=column_names, rows=rows),
    )
    by_layer = Section(
        title="Expert load by layer",
        caption=dead_caption(expert_report.dead_experts(routed)),
        plot=Markup(expert_report.plot_load_map(routed)),
    )
    # Runs from earlier releases have no router statistics.
    series = expert_report.plot_balance(routed)
    if series is None:
        return [over_time, by_layer]
    caption = (
        "Violation is the distance from even load (0), entropy the router's uncertainty (0: one expert has all the "
        "probability); steadily growing logits are the first sign of divergence."
    )
    return [over_time, by_layer, Section(title="Routing", caption=caption, plot=Markup(series))]


def dead_caption(dead: Sequence[str]) -> str:
    """Return the caption about experts that got no token for a long time."""
    if not dead:
        return f"No expert was without a token for {DEAD_AFTER_STEPS} steps in a row."
    return f"Without a token for {DEAD_AFTER_STEPS} steps or more: {first_names(dead, most=20)}."

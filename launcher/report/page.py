"""Write a run folder as one self-contained ``report.html``, to read, keep or send.

No server, no network, no script: the pictures are inline SVG. Everything shown comes from the run folder's files, so a
report can be made at any time, also while the run goes on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

import jinja2
from markupsafe import Markup

from launcher.metrics.console import short_number
from launcher.metrics.expert_load import DEAD_AFTER_STEPS
from launcher.metrics.record import DISCARDED_FILE, METRICS_FILE, Record
from launcher.report import experts, figures
from launcher.report.run import Run, load_run
from launcher.run_folder import CONFIG_FILE, ENVIRONMENT_FILE
from launcher.wording import first_names, plural
from longctx.errors import DataError
from longctx.files import replaced_file

REPORT_FILE = "report.html"

_RECENT_STEPS = 20
"""Steps that the figure of the recent training loss averages."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One key figure: its name, its value, and a line that explains it."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Plain rows under headings."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the page: a picture with a caption, or a caption that says why there is none."""

    title: str
    caption: str
    picture: Markup | None = None
    table: Table | None = None
    text: str = ""
    """Shown as it is."""


def write_report(run_folder: Path | str, output: Path | str | None = None) -> Path:
    """Write the report of a run folder and return its path (``report.html`` in the folder unless ``output`` is given).

    DataError when the folder is no run folder or a file of it is damaged. An older report is replaced in one step.
    """
    folder = Path(run_folder)
    run = load_run(folder)
    path = folder / REPORT_FILE
    if output is not None:
        path = Path(output)
    if path.is_dir():
        path = path / REPORT_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path) as temporary:
        temporary.write_text(render(run), encoding="utf-8")
    return path


def render(run: Run) -> str:
    """The page of a run, as text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        # Names and the config come from the user; only our own SVG is Markup.
        autoescape=True,
        # A misspelt name in the template is an error, not an empty space.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        name=run.name,
        state=state(run),
        progress=progress(run),
        figures=key_figures(run),
        remarks=remarks(run),
        sections=sections(run),
    )


# The head of the page.


def progress(run: Run) -> float | None:
    """Share of the planned steps that is done, 0 to 1; None where the plan is not known."""
    if not run.total_steps:
        return None
    if not run.train:
        return 0.0
    return min(1.0, run.train[-1]["step"] / run.total_steps)


def state(run: Run) -> str:
    """``finished …``, ``at step N of M`` or ``no step yet``."""
    if not run.train:
        return "no step yet"
    last, total = run.train[-1]["step"], run.total_steps
    if total is None:
        return f"at step {last:,}"
    if last >= total:
        return f"finished: {last:,} steps"
    return f"at step {last:,} of {total:,}"


def key_figures(run: Run) -> list[Figure]:
    """The figures that a reader looks for first; a figure without data is left out."""
    return _loss_figures(run) + _size_figures(run) + _speed_figures(run)


def _loss_figures(run: Run) -> list[Figure]:
    """How well the model predicts."""
    found = []
    if run.train:
        losses = [record["loss"] for record in run.train[-_RECENT_STEPS:]]
        found.append(
            Figure(
                label="Training loss",
                value=_number(losses[-1]),
                note=f"mean of the last {plural(len(losses), 'step')} {_number(_mean(losses))}",
            )
        )
    if run.validations:
        last = run.validations[-1]
        loss, entropy = last["loss"], last.get("unigram_entropy")
        found.append(
            Figure(label="Validation loss", value=_number(loss), note=f"nats a token, at step {last['step']:,}")
        )
        # Only beside the entropy a loss says something: it is what a model without any context would reach.
        if loss is not None and entropy is not None:
            note = "of predicting by frequency alone"
            found.append(Figure(label="Unigram entropy", value=_number(entropy), note=note))
            found.append(_gain_figure(entropy - loss))
    return found


def _gain_figure(gain: float) -> Figure:
    """How far the loss is below the unigram entropy."""
    note = "nats below the unigram entropy"
    if gain <= 0:
        note = "nats: not better than frequency alone yet"
    return Figure(label="Learned from context", value=_number(gain), note=note)


def _size_figures(run: Run) -> list[Figure]:
    """How much was read, and by how large a model."""
    found = []
    if run.train and run.train[-1].get("tokens") is not None:
        tokens = run.train[-1]["tokens"]
        found.append(Figure(label="Tokens", value=short_number(tokens), note=f"{tokens:,}"))
    counts = {key.rsplit(".", 1)[-1]: value for key, value in flatten(run.environment)}
    total = counts.get("num_parameters", counts.get("parameters"))
    if isinstance(total, int):
        active = counts.get("num_active_parameters", counts.get("active_parameters"))
        note = f"{total:,}"
        if isinstance(active, int):
            note = f"{active:,} active a token"
        found.append(Figure(label="Parameters", value=short_number(total), note=note))
    return found


def _speed_figures(run: Run) -> list[Figure]:
    """Speed, time and memory: medians, since the first steps of a process compile and warm up."""
    found = []
    speeds = _known(run.train, "tokens_per_second")
    if speeds:
        found.append(Figure(label="Tokens a second", value=short_number(median(speeds)), note="median, whole world"))
    used = _known(run.train, "mfu")
    if used:
        found.append(Figure(label="MFU", value=f"{median(used):.1%}", note="model FLOPs utilisation, median"))
    starts, ends = _moments(run.records)
    if ends:
        note = f"of it {duration(sum(_known(run.train, 'step_seconds')))} in steps"
        found.append(Figure(label="Wall time", value=duration(max(ends) - min(starts)), note=note))
    memory = max(_known(run.train, "max_memory_bytes"), default=0)
    if memory:
        found.append(Figure(label="Peak memory", value=f"{memory / 2**30:.1f} GiB", note="of rank 0"))
    return found


def _moments(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    """When each record's work began and ended, in seconds since 1970; a record is written when its step is over."""
    ends, starts = [], []
    for record in records:
        if "time" not in record:
            continue
        try:
            end = datetime.fromisoformat(record["time"]).timestamp()
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{METRICS_FILE}, step {record['step']}: time={record['time']!r} is no ISO time."
            ) from error
        ends.append(end)
        # A validation has no duration of its own: it lies between two steps.
        starts.append(end - (record.get("step_seconds") or 0.0))
    return starts, ends


def remarks(run: Run) -> list[str]:
    """Remarks that a reader must know before trusting the curves."""
    found = []
    broken = [r["step"] for r in run.train if r["loss"] is None or not math.isfinite(r["loss"])]
    if broken:
        found.append(f"The loss was not finite in {plural(len(broken), 'step')}, first at step {broken[0]:,}.")
    if run.resumed_steps:
        steps = ", ".join(f"{step:,}" for step in run.resumed_steps)
        found.append(f"Resumed at step {steps}; dotted green lines mark it.")
    if run.num_discarded:
        rows = plural(run.num_discarded, "row")
        found.append(f"{rows} of steps that were run again are in {DISCARDED_FILE} and are not shown.")
    routed = experts.routed_records(run.train)
    dead = []
    if routed:
        dead = experts.dead_experts(routed)
    if dead:
        found.append(
            f"Without a token for {DEAD_AFTER_STEPS} steps or more: {plural(len(dead), 'expert')}, named below."
        )
    if len(run.train) > figures.MAX_POINTS:
        size = math.ceil(len(run.train) / figures.MAX_POINTS)
        found.append(f"Each point of a curve is the mean of {size} steps.")
    return found


# The parts of the page.


def sections(run: Run) -> list[Section]:
    """Every part in the order shown; a part without data says so."""
    parts = [_loss_section(run), _position_section(run), _speed_section(run), _optimizer_section(run)]
    parts += _expert_sections(run)
    parts.append(
        Section(title="Configuration", caption=f"{CONFIG_FILE}, as the run resolved it.", text=run.config_text)
    )
    parts.append(_environment_section(run))
    return parts


def _loss_section(run: Run) -> Section:
    """Loss over the steps, or why there is none."""
    if not run.train and not run.validations:
        return Section(title="Loss", caption="No step has been logged yet.")
    caption = "The run has not been validated yet: there is nothing to compare the training loss with."
    if any(record.get("unigram_entropy") is not None for record in run.validations):
        caption = "A model that only knew how frequent each token is would be on the dashed line."
    picture = figures.loss_figure(run.train, run.validations, run.resumed_steps)
    return Section(title="Loss", caption=caption, picture=Markup(picture))


def _position_section(run: Run) -> Section:
    """Loss by position in the document: how far the context helps."""
    title = "Loss by position"
    measured = [record for record in run.validations if record.get("loss_by_position")]
    if not run.validations:
        return Section(title=title, caption="No validation has been run yet.")
    if not measured:
        return Section(title=title, caption="The validations did not record it.")
    # With one validation there is no progress to draw.
    first = None
    if len(measured) > 1:
        first = measured[0]
    caption = (
        "A model that uses its context predicts later tokens of a document better: the curve falls to the right, "
        "as far as the context helps."
    )
    return Section(title=title, caption=caption, picture=Markup(figures.position_figure(first, measured[-1])))


def _speed_section(run: Run) -> Section:
    """Tokens a second and seconds a step over the steps."""
    if not _known(run.train, "tokens_per_second"):
        return Section(title="Speed", caption="No step has been timed yet.")
    waits, seconds = sum(_known(run.train, "data_wait_seconds")), sum(_known(run.train, "step_seconds"))
    caption = ""
    if seconds:
        caption = f"{waits / seconds:.1%} of the step time was spent waiting for data."
    return Section(title="Speed", caption=caption, picture=Markup(figures.speed_figure(run.train, run.resumed_steps)))


def _optimizer_section(run: Run) -> Section:
    """Learning rate and gradient norm over the steps."""
    title = "Learning rate and gradient norm"
    if not run.train:
        return Section(title=title, caption="No step has been logged yet.")
    return Section(title=title, caption="", picture=Markup(figures.optimizer_figure(run.train, run.resumed_steps)))


def _expert_sections(run: Run) -> list[Section]:
    """Load over time, load by layer, and the router's figures where they were logged."""
    routed = experts.routed_records(run.train)
    if not run.train:
        return [Section(title="Expert load", caption="No step has been logged yet.")]
    if not routed:
        return [Section(title="Expert load", caption="The model is dense: it has no experts to balance.")]
    caption = (
        "Tokens of each expert over the layer's mean: 1 is even, red is busier, blue is idler, black got no token."
    )
    shown, num_layers = experts.uneven_rows(routed), len(routed[-1]["expert_load"])
    if len(shown) < num_layers:
        caption += (
            f" Drawn are the {len(shown)} least even of {num_layers} layers; the map below and the table have all."
        )
    headings, rows = experts.expert_table(routed)
    over_time = Section(
        title="Expert load",
        caption=caption,
        picture=Markup(experts.load_figure(routed)),
        table=Table(headings=headings, rows=rows),
    )
    by_layer = Section(
        title="Expert load by layer",
        caption=dead_caption(experts.dead_experts(routed)),
        picture=Markup(experts.map_figure(routed)),
    )
    curves = experts.balance_figure(routed)
    if curves is None:
        return [over_time, by_layer]
    caption = (
        "Violation says how far loads are from even (0), entropy how undecided the router is (0: one expert has all "
        "the probability); logits that grow without end are the first sign of a run that will diverge."
    )
    return [over_time, by_layer, Section(title="Routing", caption=caption, picture=Markup(curves))]


def dead_caption(dead: Sequence[str]) -> str:
    """The caption about experts that got no token for long."""
    if not dead:
        return f"No expert was without a token for {DEAD_AFTER_STEPS} steps in a row."
    return f"Without a token for {DEAD_AFTER_STEPS} steps or more: {first_names(dead, most=20)}."


def _environment_section(run: Run) -> Section:
    """Host, versions and degrees, as a table."""
    if not run.environment:
        return Section(title="Environment", caption=f"The run folder holds no {ENVIRONMENT_FILE}.")
    rows = [(key, _plain(value)) for key, value in flatten(run.environment)]
    table = Table(headings=("Key", "Value"), rows=rows)
    return Section(title="Environment", caption=f"{ENVIRONMENT_FILE}: where and with what the run ran.", table=table)


# Small pure helpers.


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested mappings as (dotted key, value) pairs, in order: ``{"a": {"b": 1}} -> [("a.b", 1)]``."""
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            pairs.extend(flatten(value, f"{prefix}{key}."))
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs


def duration(seconds: float) -> str:
    """Two units at most: ``42 s``, ``3 min 20 s``, ``5 h 12 min``, ``2 d 4 h``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, smaller_size, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller_size} {smaller}"
    return f"{whole} s"


def _number(value: float | None) -> str:
    """Four decimals; a dash for what is not known."""
    if value is None:
        return "–"
    return f"{value:.4f}"


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of the finite values; None without any."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    return fmean(known)


def _known(records: Sequence[Record], key: str) -> list[float]:
    """The finite values of a key: one broken step must not hide the figures of the others."""
    values = (record.get(key) for record in records)
    return [value for value in values if value is not None and math.isfinite(value)]


def _plain(value: Any) -> str:
    """A value of the environment as text: lists of plain values with commas, anything deeper as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(not isinstance(item, list | dict) for item in value):
        return ", ".join(str(item) for item in value)
    return json.dumps(value, ensure_ascii=False)

"""Write several runs side by side as one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import FuncFormatter

from launcher.metrics.console import short_number
from launcher.report.figures import Series, finish, new_figure, styled, to_svg
from launcher.report.head import key_figures, state
from launcher.report.page import write_page
from launcher.report.run import Run, load_run
from launcher.report.section import Section, Table
from launcher.report.template import fill_template
from launcher.report.text import flatten, plain
from launcher.wording import plural
from longctx.errors import ConfigError

COMPARISON_FILE = "comparison.html"

COLOURS = ("#3b82c4", "#e08a1e", "#3a9d6e", "#d1495b", "#8e6bbf", "#8a8f98", "#b5651d", "#17a2b8")
"""Of the runs, in their order; more runs begin again."""
_PATHS = ("run.output_dir",)
"""Keys of the config that differ between any two runs."""


def write_comparison(folders: Sequence[Path], output: Path | str | None = None) -> Path:
    """Write the comparison of these run folders and return its path, ``comparison.html`` here unless it is given.

    ConfigError for a folder that is named twice, DataError for what is no run folder.
    """
    resolved = [folder.resolve() for folder in folders]
    twice = [folder for folder, path in zip(folders, resolved, strict=True) if resolved.count(path) > 1]
    if twice:
        raise ConfigError(f"{twice[0]} is named twice. Name each run once.")
    runs = [load_run(folder) for folder in folders]
    return write_page(lambda: render(runs, distinct_names(resolved)), Path(output or COMPARISON_FILE), COMPARISON_FILE)


def render(runs: Sequence[Run], names: Sequence[str]) -> str:
    """The page, as text."""
    return fill_template(
        name=" · ".join(names),
        state=plural(len(runs), "run"),
        progress=None,
        figures=[],
        remarks=[],
        sections=sections(runs, names),
        source="the runs' folders",
    )


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many of their parents as it takes to tell them apart."""
    for length in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def sections(runs: Sequence[Run], names: Sequence[str]) -> list[Section]:
    """Return key figures as a table, losses over tokens, and the config keys that differ."""
    caption = "No step has been logged yet."
    picture = loss_figure(runs, names)
    if picture is not None:
        caption = "Lines are training losses, smoothed; dots are validations."
    rows = differences(runs)
    differing = "The keys of the configs that differ; – where a run lacks one."
    if not rows:
        differing = "The configs are the same, but for the folders."
    return [
        Section(title="Side by side", caption="", table=figure_table(runs, names)),
        Section(title="Loss", caption=caption, picture=picture),
        Section(title="What differs", caption=differing, table=Table(headings=("Key", *names), rows=rows)),
    ]


def figure_table(runs: Sequence[Run], names: Sequence[str]) -> Table:
    """The runs' key figures, one a row; – where a run does not have one."""
    by_run = [{figure.label: figure.value for figure in key_figures(run)} for run in runs]
    # In the order of a report; a run may have figures that another lacks.
    labels = list(dict.fromkeys(label for found in by_run for label in found))
    rows = [("State", *(state(run) for run in runs))]
    rows += [(label, *(found.get(label, "–") for found in by_run)) for label in labels]
    return Table(headings=("", *names), rows=rows)


def differences(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """The keys whose values differ between the runs' configs, with the values."""
    configs = [dict(flatten(run.config)) for run in runs]
    rows: list[tuple[str, ...]] = []
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [plain(config[key]) if key in config else "–" for config in configs]
        if key not in _PATHS and len(set(values)) > 1:
            rows.append((key, *values))
    return rows


@styled
def loss_figure(runs: Sequence[Run], names: Sequence[str]) -> Markup | None:
    """Draw training losses, smoothed, and validation losses over the tokens; None without any."""
    figure, (axes,) = new_figure(1, height=3.9)
    drawn = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        colour, label = COLOURS[number % len(COLOURS)], name
        for records, style in ((run.train, "-"), (run.validations, "o--")):
            loss = Series.of(records, "loss")
            if not loss.drawable:
                continue
            drawn.append(loss)
            if style == "-":
                loss = loss.smoothed().thinned()
            points = _over_tokens(run, loss)
            axes.plot(points.steps, points.values, style, color=colour, markersize=4, label=label)
            # A run stands in the legend once.
            label = None
    if not drawn:
        return None
    finish(axes, "tokens", "loss (nats a token)", drawn[0])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    axes.legend(loc="upper right")
    return Markup(to_svg(figure, "loss"))


def _over_tokens(run: Run, series: Series) -> Series:
    """Return the series over the run's tokens instead of its steps; empty if no record has tokens."""
    known = Series.of(run.train, "tokens")
    if not known.drawable:
        return Series(steps=np.empty(0), values=np.empty(0))
    steps, tokens = np.append(0.0, known.steps), np.append(0.0, known.values)
    return Series(steps=np.interp(series.steps, steps, tokens), values=series.values)

"""Write several runs side by side as one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from launcher.report import comparison_figures
from launcher.report.head import key_figures, state
from launcher.report.page import write_page
from launcher.report.run import Run, load_run
from launcher.report.section import Section, Table
from launcher.report.template import fill_template
from launcher.report.text import flatten, plain
from launcher.wording import plural
from longctx.errors import ConfigError

COMPARISON_FILE = "comparison.html"

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
    """Figures as a table, curves over tokens and over steps, sample texts, and the keys that differ."""
    parts = [Section(title="Side by side", caption="", table=figure_table(runs, names))]
    parts.append(_curves("Loss by tokens", runs, names, "tokens"))
    parts.append(_curves("Loss by steps", runs, names, "step"))
    picture = comparison_figures.speed_figure(runs, names)
    if picture is not None:
        parts.append(Section(title="Speed and gradient norm", caption="", picture=Markup(picture)))
    samples = _sample_table(runs, names)
    if samples is not None:
        caption = "Greedy, by the weights of each run's last validation that wrote one."
        parts.append(Section(title="Sample text", caption=caption, table=samples))
    rows = differences(runs)
    caption = "The keys of the configs that differ; – where a run lacks one."
    if not rows:
        caption = "The configs are the same, but for the folders."
    parts.append(Section(title="What differs", caption=caption, table=Table(headings=("Key", *names), rows=rows)))
    return parts


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


def _curves(title: str, runs: Sequence[Run], names: Sequence[str], axis: str) -> Section:
    """Training and validation loss of all runs over tokens or steps."""
    picture = comparison_figures.loss_figure(runs, names, axis)
    if picture is None:
        return Section(title=title, caption="No step has been logged yet.")
    caption = "Lines are training losses, smoothed; dots are validations."
    return Section(title=title, caption=caption, picture=Markup(picture))


def _sample_table(runs: Sequence[Run], names: Sequence[str]) -> Table | None:
    """The newest sample text of each run; None where no run wrote one."""
    rows = []
    for run, name in zip(runs, names, strict=True):
        sampled = [record for record in run.validations if record.get("sample")]
        if sampled:
            newest = sampled[-1]
            sample = newest["sample"]
            rows.append((name, f"{newest['step']:,}", sample["prompt"], sample["text"]))
    if not rows:
        return None
    return Table(headings=("Run", "Step", "Prompt", "Text"), rows=rows, has_text=True)

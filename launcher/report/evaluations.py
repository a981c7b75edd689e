"""Write several evaluations side by side: needles in panels of one scale, and scores by length as a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from launcher.report.comparison import COMPARISON_FILE, distinct_names
from launcher.report.evaluation.figures import needle_figure
from launcher.report.evaluation.folder import SETTINGS_FILE, Evaluation, load_evaluation
from launcher.report.evaluation.tables import Rows, depth_rows, score_rows, tasks_with_depth, write_csv
from launcher.report.figures import standalone
from launcher.report.page import write_page
from launcher.report.section import Section, Table
from launcher.report.template import fill_template
from launcher.wording import plural
from longctx.errors import ConfigError
from longctx.files import write_atomically


def is_evaluation(folder: Path) -> bool:
    """Whether a folder is what ``evaluate`` has written."""
    return (folder / SETTINGS_FILE).is_file()


def write_evaluations(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the comparison of these evaluations and return its path, ``comparison.html`` here unless it is given.

    Its pictures, and what they were drawn from, are files beside it. ConfigError for a folder that is named twice, and
    where no task with depth is in all of them; DataError for what is no evaluation.
    """
    resolved = [folder.resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        raise ConfigError("an evaluation is named twice. Name each one once.")
    evaluations = [load_evaluation(folder) for folder in folders]
    names = distinct_names(resolved)
    tasks = common_tasks(evaluations)
    if not tasks:
        raise ConfigError(f"{', '.join(names)} have no task with depth in common: there is nothing to draw.")
    page = Path(output or COMPARISON_FILE)
    # Scores first: a task without depth has no picture.
    sections = [_score_section(evaluations, names)]
    for task in tasks:
        rows = panel_rows(evaluations, names, task)
        picture = _needle_picture(evaluations, names, task)
        # Files of their own: a picture is sent around without its page.
        beside = page.with_name(f"{page.stem}_{task}.svg")
        write_atomically(beside, standalone(picture).encode())
        write_csv(beside.with_suffix(".csv"), rows)
        caption = "The scale is fixed from 0 to 1; n is the number of samples; what was not tested is blank."
        sections.append(Section(title=f"{task} by length and depth", caption=caption, picture=Markup(picture)))
    return write_page(lambda: _render(names, sections), page, COMPARISON_FILE)


def common_tasks(evaluations: Sequence[Evaluation]) -> list[str]:
    """The tasks with depth that every evaluation has."""
    first, *others = [tasks_with_depth(evaluation) for evaluation in evaluations]
    return [task for task in first if all(task in tasks for tasks in others)]


def panel_rows(evaluations: Sequence[Evaluation], names: Sequence[str], task: str) -> Rows:
    """What the panels of a task are drawn from, each row with its evaluation's name."""
    return [
        {"evaluation": name, **row}
        for evaluation, name in zip(evaluations, names, strict=True)
        for row in depth_rows(evaluation, task)
    ]


def _needle_picture(evaluations: Sequence[Evaluation], names: Sequence[str], task: str) -> str:
    panels = [(name, depth_rows(evaluation, task)) for name, evaluation in zip(names, evaluations, strict=True)]
    lengths = sorted({row["length"] for _, rows in panels for row in rows})
    # A line each: models, dates and numbers of samples may all differ.
    parts = []
    for evaluation, (name, rows) in zip(evaluations, panels, strict=True):
        count = plural(sum(row["n"] for row in rows), "sample")
        parts.append(f"{name}: {evaluation.caption}, n = {count}")
    caption = f"{task} · lengths {lengths[0]:,} to {lengths[-1]:,}\n" + "\n".join(parts)
    return needle_figure(panels, caption, re.sub(r"[^A-Za-z0-9]", "-", f"panels-{task}"))


def _score_section(evaluations: Sequence[Evaluation], names: Sequence[str]) -> Section:
    """A row for each task and evaluation, a column a length."""
    found = [score_rows(evaluation) for evaluation in evaluations]
    lengths = sorted({row["length"] for rows in found for row in rows})
    tasks = list(dict.fromkeys(row["task"] for rows in found for row in rows))
    lines = []
    for task in tasks:
        for name, rows in zip(names, found, strict=True):
            cells = {row["length"]: f"{row['mean']:.3f}, n={row['n']}" for row in rows if row["task"] == task}
            lines.append((task, name, *(cells.get(length, "–") for length in lengths)))
    headings = ("Task", "Evaluation", *(f"{length:,}" for length in lengths))
    return Section(title="Scores by length", caption="Mean score.", table=Table(headings=headings, rows=lines))


def _render(names: Sequence[str], sections: Sequence[Section]) -> str:
    return fill_template(
        name=" · ".join(names),
        state=plural(len(names), "evaluation"),
        progress=None,
        figures=[],
        remarks=[],
        sections=sections,
        source="the evaluations' folders",
    )

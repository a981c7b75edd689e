"""Self-contained page: its sections, their templates, and writing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from longctx.files import replaced_file


@dataclass(frozen=True, kw_only=True)
class KeyMetric:
    """Key metric: name, value and a line of explanation."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Plain rows under headings."""

    column_names: Sequence[str]
    rows: Sequence[Sequence[str]]
    has_text: bool = False
    """True if the last column is text that keeps its lines and spaces."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Page section: a plot or table with a caption, or only a caption that explains their absence."""

    title: str
    caption: str
    plot: Markup | None = None
    table: Table | None = None


def render_page(
    name: str,
    state: str,
    sections: Sequence[Section],
    *,
    source: str,
    progress: float | None = None,
    metrics: Sequence[KeyMetric] = (),
    warnings: Sequence[str] = (),
) -> str:
    """Return the page for one run, one evaluation or several; ``progress`` is a share, None to hide it."""
    return fill_template(
        "report.html",
        name=name,
        state=state,
        progress=progress,
        metrics=metrics,
        warnings=warnings,
        sections=sections,
        source=source,
    )


def fill_template(template: str, /, **values: Any) -> str:
    """Fill the template file ``template`` with these values."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        # Names and texts come from the user; only our own SVG is Markup.
        autoescape=True,
        # A misspelt name in a template raises an error instead of leaving a gap.
        undefined=jinja2.StrictUndefined,
        # Template lines without text leave no blank lines in the page.
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def page_path(path: Path, name: str) -> Path:
    """Return a page's file: ``path``, or if that is a folder, ``name`` in it."""
    return path / name if path.is_dir() else path


def write_page(make: Callable[[], str], path: Path, name: str) -> Path:
    """Write a page and return its path; if ``path`` is a folder, write it there as ``name``."""
    path = page_path(path, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Replace the old page only after the new one is complete: a failed report keeps the old one.
    with replaced_file(path) as temporary:
        temporary.write_text(make(), encoding="utf-8")
    return path

"""A self-contained page: its sections, the templates for them, and writing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from longctx.files import replaced_file


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
    has_text: bool = False
    """Whether the last column is text whose lines and spaces are shown as they are."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section of the page: a picture or a table with a caption, or only a caption explaining their absence."""

    title: str
    caption: str
    picture: Markup | None = None
    table: Table | None = None


def render_page(
    name: str,
    state: str,
    sections: Sequence[Section],
    *,
    source: str,
    progress: float | None = None,
    figures: Sequence[Figure] = (),
    remarks: Sequence[str] = (),
) -> str:
    """Return the page of a run, of an evaluation or of several; ``progress`` is a share, None to show none."""
    return fill_template(
        "report.html",
        name=name,
        state=state,
        progress=progress,
        figures=figures,
        remarks=remarks,
        sections=sections,
        source=source,
    )


def fill_template(template: str, /, **values: Any) -> str:
    """Fill one of our templates, named by its file, with these values."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        # Names and texts come from the user; only our own SVG is Markup.
        autoescape=True,
        # A misspelt name in the template is an error, not an empty space.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def write_page(make: Callable[[], str], path: Path, name: str) -> Path:
    """Write a page and return its path; if ``path`` is a folder, the page gets this name in it."""
    if path.is_dir():
        path = path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path) as temporary:
        temporary.write_text(make(), encoding="utf-8")
    return path

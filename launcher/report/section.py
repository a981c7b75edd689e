"""What a page is made of: parts with a title, each with a picture, a table or text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup


@dataclass(frozen=True, kw_only=True)
class Table:
    """Plain rows under headings."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    has_text: bool = False
    """Whether the last column is text whose lines and spaces are shown as they are."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the page: a picture with a caption, or a caption that says why there is none."""

    title: str
    caption: str
    picture: Markup | None = None
    table: Table | None = None
    text: str = ""
    """Shown as it is."""

"""Fill the templates of pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2


def fill_template(name: str = "report.html", /, **values: Any) -> str:
    """A page's template with these values."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        # Names and the config come from the user; only our own SVG is Markup.
        autoescape=True,
        # A misspelt name in the template is an error, not an empty space.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(**values)

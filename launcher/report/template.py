"""Pages are filled templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2


def fill(template: str, **values: Any) -> str:
    """The template of this name with these values."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        # Names and the config come from the user; only our own SVG is Markup.
        autoescape=True,
        # A misspelt name in the template is an error, not an empty space.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)

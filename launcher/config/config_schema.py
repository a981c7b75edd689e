"""JSON schema for a run's TOML file, with which editors complete keys and mark invalid values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter

from launcher.config.config_sections import RunConfig
from launcher.config.help import CHOICES_OF, meanings_of


def schema_text(adapter: TypeAdapter[RunConfig]) -> str:
    """Return the schema as JSON: sections, and keys with types, choices and meanings; other keys are invalid."""
    schema = adapter.json_schema()
    schema["additionalProperties"] = False
    for prefix, section in _sections(RunConfig(), ""):
        entry = schema["$defs"][type(section).__name__]
        entry["additionalProperties"] = False
        for name, description in meanings_of(type(section)).items():
            # A field that another class's default fills in is described there and has no entry here.
            if name not in entry["properties"]:
                continue
            entry["properties"][name]["description"] = description
            choices = CHOICES_OF.get(f"{prefix}{name}")
            if choices and entry["properties"][name].get("type") == "string":
                entry["properties"][name]["enum"] = list(choices)
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=1)


def _sections(config: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield each section and nested table in a config, with its key prefix."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield f"{prefix}{f.name}.", value
            yield from _sections(value, f"{prefix}{f.name}.")

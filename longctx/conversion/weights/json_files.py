"""JSON files of strangers, read strictly; and our own, written to be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longctx.errors import CheckpointError

_MAX_JSON_BYTES = 256 * 2**20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; CheckpointError when it is missing, damaged, no object, or names a key twice."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write readable JSON, keys in the given order."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def parse_json(text: str) -> Any:
    """JSON in which no object names a key twice; ValueError otherwise."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # json takes the last of two: a file could then say one thing to us and another to a stricter reader.
        if len(dict(pairs)) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = ["a key"]
            # The search takes the square of their number.
            if len(keys) < 10_000:
                twice = sorted({key for key in keys if keys.count(key) > 1})
            raise ValueError(f"it names {', '.join(twice[:12])} twice")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=unique)

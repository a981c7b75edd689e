"""Strict reading for untrusted JSON files, and readable writing for our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longctx.errors import CheckpointError
from longctx.untrusted.strict_json import read_json as read_strictly


def read_checkpoint_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise CheckpointError if it is missing, damaged, too large or not a valid object."""
    try:
        content = read_strictly(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write readable JSON, with keys in the given order."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

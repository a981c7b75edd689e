"""Prompts of the verb ``generate``: of the command line, of a text file, or many of a file of JSON lines."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longctx.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """One of many prompts."""

    text: str
    fields: dict[str, Any]
    """All that its line says: it comes back with the continuation."""


def read_prompt(prompt: str | None, path: Path | None) -> str:
    """The prompt's text; DataError for a file that is not there, or not UTF-8."""
    if path is None:
        return prompt or ""
    return _read_text(path, "--prompt-file")


def read_prompts(path: Path) -> list[Prompt]:
    """One prompt a line, ``{"prompt": TEXT, …}``; DataError for a line that is none, by its number."""
    prompts = []
    # Not splitlines: a JSON text may hold the other characters that it takes for the end of a line.
    for number, line in enumerate(_read_text(path, "--prompts-file").split("\n"), start=1):
        if line.strip():
            prompts.append(_prompt(line, f"--prompts-file {path}, line {number}"))
    if not prompts:
        raise DataError(f'--prompts-file {path} has no prompt. Write one a line: {{"prompt": "def main("}}')
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    example = 'Write lines like {"prompt": "def main("}.'
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is no JSON ({error}). {example}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        raise DataError(f'{where} has no text under "prompt". {example}')
    return Prompt(fields["prompt"], fields)


def _read_text(path: Path, option: str) -> str:
    try:
        if str(path) == "-":
            content = sys.stdin.buffer.read()
        else:
            content = path.read_bytes()
        return content.decode()
    except OSError as error:
        raise DataError(f"{option} {path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{option} {path} is not UTF-8 at byte {error.start:,}. Convert it first: iconv -t utf-8."
        ) from error

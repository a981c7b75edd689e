"""The miniature tokenizers of the families, each built once for the whole session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.longctx.tokenizer.families import build


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that gives the folder of a family's tokenizer files. Read-only: change a copy."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = build(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder

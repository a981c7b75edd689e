"""The commands that README, docs and tutorials show: found, and read as the programs would read them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import REPOSITORY

RUN_MARK = "<!-- run -->"
"""Above a block whose commands a test runs, in order, in one folder."""

PAGES = (
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted(p for p in (REPOSITORY / "docs").rglob("*.md") if "decisions" not in p.parts),
)
_BLOCK = re.compile(rf"^(?P<mark>{re.escape(RUN_MARK)}\n)?```(?:bash|sh)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One fenced block of commands."""

    page: Path
    line: int
    is_run: bool
    commands: tuple[tuple[str, ...], ...]
    """Each command as words, comments left out and continued lines joined."""


def blocks_of(page: Path) -> list[Block]:
    """The page's blocks in their order."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, match["mark"] is not None, commands_of(match["text"])))
    return found


def commands_of(text: str) -> tuple[tuple[str, ...], ...]:
    """The commands of a block; ``a && b`` are two."""
    commands = []
    for line in text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word != "&&":
                words.append(word)
            elif words:
                commands.append(tuple(words))
                words = []
    return tuple(commands)


ALL_BLOCKS = [block for page in PAGES for block in blocks_of(page)]
ALL_COMMANDS = [(f"{b.page.name}:{b.line}", command) for b in ALL_BLOCKS for command in b.commands]

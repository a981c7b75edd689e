"""Rows of the fault suite: what was injected, what the user saw, how long it took, and what it cost.

A test records a row by the fixture ``fault_rows`` (``tests/conftest.py``); it is then one of the suite's, which
``pytest -m fault`` selects. ``--fault-rows FILE`` keeps the rows, one JSON object on a line, in whatever process a
test runs. ``python -m benchmarks.faults`` makes the table of ``docs/faults.md`` from them.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

GROUPS = ("process", "save", "ring", "numbers", "files", "cluster")
"""Of the table, in its order."""
_LONGEST = 200
"""Characters of a verdict: its first sentence, not its screen."""


@dataclass(frozen=True, kw_only=True)
class FaultRow:
    """One fault, as a test has measured it. Nothing in a row is typed in but ``kind`` and ``injected``."""

    group: str
    kind: str
    """Short and unique: "SIGKILL in a hop"."""
    injected: str
    """What exactly was done, to whom, at which point."""
    seen: str
    """The verdict: words that the user read, taken from the output by ``verdict``."""
    seconds: float
    """From the fault to the verdict: where ranks end by it, to the end of the last one."""
    steps_lost: int
    """Steps that were recorded and had to be taken again after recovery, or were left out."""
    beyond_checkpoint: int
    """Of those, the ones that a good checkpoint held: 0 unless something is wrong."""
    equal: bool
    """Whether all metrics after recovery are those of an undisturbed run, to the last bit."""

    def __post_init__(self) -> None:
        assert self.group in GROUPS, self.group
        assert self.seen, f"{self.kind}: nobody saw anything"
        assert self.seconds >= 0, self


class FaultRows:
    """Where tests put their rows."""

    def __init__(self, path: Path | None) -> None:
        """``path`` is None where nobody asked for rows: they are checked all the same."""
        self._path = path

    def add(self, row: FaultRow) -> None:
        """Keep a row; AssertionError where the run did not recover, or lost what a checkpoint held."""
        if self._path is not None:
            # In one write of a file that is only appended to: several processes of pytest-xdist share it.
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.write(handle, (json.dumps(asdict(row)) + "\n").encode())
            os.close(handle)
        assert row.equal, f"{row.kind}: the metrics are not those of an undisturbed run"
        assert row.beyond_checkpoint == 0, f"{row.kind}: {row.beyond_checkpoint} steps lost that a checkpoint held"


def read_rows(path: Path) -> list[FaultRow]:
    """The rows of a file, by group and kind. The last one of a kind counts."""
    if not path.exists():
        return []
    found = {}
    for line in path.read_text().splitlines():
        row = FaultRow(**json.loads(line))
        found[row.group, row.kind] = row
    return sorted(found.values(), key=lambda row: (GROUPS.index(row.group), row.kind))


def verdict(text: str, words: str, names: Mapping[Path, str] | None = None) -> str:
    """The one line of an output that has these words, without what differs from machine to machine.

    ``names`` says what to call folders of the test. AssertionError where the words are not there, or on several lines.
    """
    lines = [line.strip() for line in text.splitlines() if words in line]
    assert len(set(lines)) == 1, f"{words!r} stands on {len(set(lines))} lines of:\n{text}"
    line = lines[0]
    for folder, name in (names or {}).items():
        line = line.replace(str(folder), name)
    # A log's line begins with a time and the name of its logger.
    line = re.sub(r"^\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ [\w.]+: ", "", line)
    line = line.replace(socket.gethostname(), "HOST")
    line = re.sub(r"\b(port:) \d+", r"\1 N", line)
    line = re.sub(r"\b(process|pid) \d+", r"\1 N", re.sub(r"(\d\.\d+):\d{4,5}\b", r"\1:PORT", line))
    if len(line) > _LONGEST:
        line = line[:_LONGEST].rsplit(" ", 1)[0] + " …"
    return line

"""Table of the fault suite: injected fault, message to the user, seconds to the verdict, steps lost, recovery.

    python -m benchmarks.faults [--only EXPRESSION] [--rows FILE]

Runs the tests that record a row (``pytest -m fault``), one after the other, because they are timed. ``--only`` selects
tests, like pytest's ``-k``; other tests keep their earlier rows. ``--rows`` keeps the rows in a file, from which an
interrupted suite continues. Exit code 1 if a test fails; its row is left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import KINDS, RESULTS, offer_save, processor_kind, save
from tests.faults import GROUPS, FaultRow, read_rows

NAME = "faults"
REPOSITORY = Path(__file__).resolve().parent.parent


def run_suite(rows: Path, only: str) -> int:
    """Run the suite's tests, which append to ``rows``; return pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "tests", "-q", "-p", "no:xdist", "-m", "fault", "--timeout", "1800"]
    # As one word: pytest takes a separate path for tests.
    words = [*command, "-k", only, f"--fault-rows={rows}"]
    return subprocess.run(words, cwd=REPOSITORY, check=False).returncode


def measured_before() -> list[dict[str, Any]]:
    """Return the saved rows; those for this kind of processor come last, and take precedence."""
    kinds = sorted(KINDS, key=lambda kind: kind == processor_kind())
    paths = [path for kind in kinds if (path := RESULTS / kind / f"{NAME}.json").exists()]
    return [row for path in paths for row in json.loads(path.read_text())["rows"]]


def merged(before: Sequence[dict[str, Any]], found: Sequence[FaultRow]) -> list[dict[str, Any]]:
    """Return the rows by group and kind, each with its date; newer rows replace older ones."""
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    rows = {(row["group"], row["kind"]): row for row in before}
    rows |= {(row.group, row.kind): {**asdict(row), "date": today} for row in found}
    return sorted(rows.values(), key=lambda row: (GROUPS.index(row["group"]), row["kind"]))


def table(result: dict[str, Any]) -> tuple[Sequence[str], list[list[str]]]:
    """Return headings and rows for the page's table."""
    head = ("", "injected", "the user saw", "seconds", "steps lost", "metrics after recovery")
    return head, [_line(row) for row in result["rows"]]


def _line(row: dict[str, Any]) -> list[str]:
    equality = "differ"
    if row["equal"]:
        equality = "equal"
    # A bar would end the table cell.
    seen = row["seen"].replace("|", "\\|")
    seconds = "< 0.1"
    if row["seconds"] >= 0.1:
        seconds = f"{row['seconds']:.1f}"
    injected = f"**{row['kind']}**: {row['injected']}"
    return [row["group"], injected, seen, seconds, str(row["steps_lost"]), equality]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite, and print its row count."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="EXPRESSION", help="the tests to run, as pytest's -k takes them")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="keep the rows in this file, and begin with its rows")
    offer_save(parser)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = options.rows or Path(folder) / "rows.jsonl"
        code = run_suite(path.absolute(), options.only)
        found = read_rows(path)
    # Only a complete suite may drop the row of a test that no longer exists.
    before = measured_before()
    rows = merged(before if options.only or options.rows else [], [row for row in found if row.equal])
    print(f"{len(rows)} kinds of faults")
    # A skipped test, for lack of a program, silently removes its row.
    there = {(row["group"], row["kind"]) for row in rows}
    for group, kind in dict.fromkeys((row["group"], row["kind"]) for row in before):
        if (group, kind) not in there:
            print(f"no row any more, by a test that failed, was skipped or is gone: {group}, {kind}")
    if options.save:
        print(f"saved in {save(NAME, {'rows': rows})}")
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())

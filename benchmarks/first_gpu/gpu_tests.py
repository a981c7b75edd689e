"""Steps tests and flex: the tests that need a GPU, file by file; those of FlexAttention, which compile, apart.

In a dry run they are collected only.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from benchmarks.first_gpu import contact
from benchmarks.first_gpu.checks import ROOT, Job, Sheet, run_step
from benchmarks.first_gpu.commands import Command

_NONE_SELECTED = 5
_SECONDS = {"other": 70.0, "flex": 75.0}


def run(job: Job, sheet: Sheet) -> None:
    """Run the selected half of the tests: ``other`` or ``flex``."""
    (half,) = job.which
    if half == "flex":
        with sheet.attempt("flex kernel"):
            contact.flex(job, sheet)
    passed, commands = 0, {}
    for file in files():
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", file]
        words += ["-k", "flex" if half == "flex" else "not flex"]
        words += job.pick(workers(file), ["--collect-only"])
        # A number for pytest's own limit, which is below the step's.
        commands[file] = Command(words, seconds=job.pick(_SECONDS[half], 300))
    for file, command in commands.items():
        with sheet.attempt(file):
            passed += judged(file, command, sheet)
    sheet.add("passed", float(passed), unit=job.pick("tests", "tests collected"))


def judged(file: str, command: Command, sheet: Sheet) -> int:
    """Return the number of passed (or collected) tests in a file, and add a check for the file."""
    text = command.output()
    if command.code == _NONE_SELECTED:
        return 0
    summary = next((line for line in reversed(text.splitlines()) if re.search(r" in [\d.]+s", line)), "")
    failed = [line.split(" ")[1] for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    problem = ""
    if command.code != 0 or not summary:
        problem = f"{summary.strip(' =') or 'no summary'}: {', '.join(name.split('::')[-1] for name in failed)}"
    found = re.search(r"(\d+)(?:/\d+)? (?:passed|tests? collected)", summary)
    number = int(found[1]) if found else 0
    sheet.add(file, float(number), unit="tests", note=summary.strip(" ="), problem=problem)
    return number


def workers(file: str) -> list[str]:
    """Return pytest's option for several workers for the file with the most tests; for few tests their start takes
    longer.
    """
    if "attention" in file:
        return ["-n", "4"]
    return []


def files() -> list[str]:
    """Return the test files that have tests for one GPU."""
    texts = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    return [str(path.relative_to(ROOT)) for path, text in texts.items() if re.search(r"pytest\.mark\.gpu\b", text)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the step as a command."""
    return run_step(run, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

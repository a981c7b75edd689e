"""Messages from a step's process to the runner: results and problems, written to a file as soon as they are known."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One result of a step, or the reason for its absence."""

    name: str
    figure: float | None = None
    unit: str = ""
    bound: float | None = None
    """Maximum for a correct result; None for a rate or a fact."""
    expected: float | None = None
    """Expected value; None takes the step's own expectation, if it has one."""
    source: str = ""
    """Source of ``expected``."""
    at_most: bool = False
    """True if ``expected`` is a size or a time, for which less is better."""
    note: str = ""
    problem: str = ""
    """Reason for the failure; empty if the check passed."""
    skipped: str = ""
    """Reason why it cannot run here; empty if it ran."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A step process's arguments."""

    device: str
    """``cuda``, or ``cpu`` in a dry run."""
    scratch: Path
    """Folder common to all steps of a run; each writes its checks there as ``NAME.json``."""
    name: str
    which: tuple[str, ...] = ()
    """Names of the selected checks; empty for all."""

    @property
    def dry(self) -> bool:
        """True for small sizes on a CPU."""
        return self.device == "cpu"

    def pick(self, full: Any, dry: Any) -> Any:
        """Return the first value, or the second in a dry run."""
        return dry if self.dry else full

    def figure_of(self, step: str, name: str) -> float | None:
        """Return the result of another step's check; None if it was not measured."""
        return next((check.figure for check in load_checks(self.scratch / f"{step}.json") if check.name == name), None)


class Sheet:
    """The checks of one step, saved whenever one is added, so that a killed step leaves the earlier ones."""

    def __init__(self, path: Path) -> None:
        self._path, self.checks = path, []
        self._save()

    def add(self, name: str, figure: float | None = None, **rest: Any) -> None:
        """Add a check, print it, and save all."""
        check = Check(name=name, figure=figure, **rest)
        self.checks.append(check)
        print(f"{name}: {shown(check)}", flush=True)
        self._save()

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Turn an exception in the ``with`` block into a failed check; the code after the block runs in any case."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.add(name, problem=one_line(f"{type(error).__name__}: {error}"))

    def _save(self) -> None:
        self._path.write_text(json.dumps([asdict(check) for check in self.checks]))


def one_line(text: str, most: int = 200) -> str:
    """Return the text on one line, cut to ``most`` characters."""
    return " ".join(text.split())[:most]


def shown(check: Check) -> str:
    """Return a check's result, or the reason for its absence, as text."""
    if check.problem or check.skipped:
        return check.problem or f"not run: {check.skipped}"
    parts = [f"{number(check.figure)} {check.unit}".strip(), check.note]
    return ", ".join(part for part in parts if part)


def number(value: float | None) -> str:
    """Return a value with its significant digits."""
    if value is None:
        return "done"
    if value == 0 or 0.01 <= abs(value) < 1e6:
        digits = 0 if abs(value) >= 100 or value == int(value) else 2 if abs(value) >= 1 else 3
        return f"{value:,.{digits}f}"
    return f"{value:.1e}"


def load_checks(path: Path) -> list[Check]:
    """Return the checks that a step has saved; empty if it never began, or was killed while it saved."""
    try:
        return [Check(**values) for values in json.loads(path.read_text())]
    except (FileNotFoundError, ValueError):
        return []


def run_step(run: Callable[[Job, Sheet], None], description: str | None, arguments: Sequence[str] | None) -> int:
    """Read the command line of a step's process, run the step, and return the exit code."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("which", nargs="*", help="checks of the step (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--scratch", type=Path, required=True, help="folder common to all steps of a run")
    parser.add_argument("--name", required=True, help="name of the step")
    wanted = parser.parse_args(arguments)
    wanted.scratch.mkdir(parents=True, exist_ok=True)
    job = Job(device=wanted.device, scratch=wanted.scratch, name=wanted.name, which=tuple(wanted.which))
    sheet = Sheet(job.scratch / f"{job.name}.json")
    run(job, sheet)
    return 0


def module_of(name: str) -> list[str]:
    """Return the command that runs a module in this folder as a step's process."""
    return [sys.executable, "-m", f"benchmarks.first_gpu.{name}"]

"""Verdicts: OK, SLOW (correct, but below 0.85 of the expectation), FAIL, SKIP; a line per step, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.first_gpu.checks import Check, number, one_line, shown
from benchmarks.first_gpu.steps import Step

OK, SLOW, FAIL, SKIP = "OK", "SLOW", "FAIL", "SKIP"
SLOW_SHARE = 0.85
MOST_CHARACTERS = 11_500
_ORDER = (FAIL, SLOW, OK, SKIP)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a step."""

    name: str
    verdict: str
    seconds: float
    checks: tuple[Check, ...] = ()
    verdicts: tuple[str, ...] = ()
    """One verdict per check."""
    problem: str = ""
    """Reason why its process failed or did not begin; empty otherwise."""
    shows: str = ""
    """The check whose result is in the step's line if all are well."""

    def to_json(self) -> dict[str, Any]:
        """Return the outcome for the report."""
        checks = [asdict(check) | {"verdict": v} for check, v in zip(self.checks, self.verdicts, strict=True)]
        kept = {"name": self.name, "verdict": self.verdict, "seconds": round(self.seconds, 1)}
        return kept | {"problem": self.problem, "checks": checks}


def judge(
    step: Step, checks: Sequence[Check], *, seconds: float, problem: str = "", dry: bool = False, card: str = ""
) -> Outcome:
    """Return the verdict on a step's checks. A dry run measures nothing, so its results have no expectations."""
    filled = list(checks)
    if not dry:
        filled = [_with_expectation(step, check, card) for check in checks]
    verdicts = tuple(_verdict(check, dry=dry) for check in filled)
    verdict = next((one for one in _ORDER if one in verdicts), FAIL)
    if not filled and not problem:
        problem = "it checked nothing"
    if problem:
        verdict = FAIL
    return Outcome(
        name=step.name, verdict=verdict, seconds=seconds, checks=tuple(filled), verdicts=verdicts, problem=problem,
        shows=step.shows,
    )  # fmt: skip


def skipped_outcome(step: Step, why: str) -> Outcome:
    """Return the outcome of a step that did not begin."""
    return Outcome(name=step.name, verdict=SKIP, seconds=0.0, problem=why)


def _with_expectation(step: Step, check: Check, card: str) -> Check:
    expected = step.expected.get(check.name)
    if expected is None or check.expected is not None:
        return check
    return replace(check, expected=expected.on(card), source=expected.source, at_most=expected.at_most)


def _verdict(check: Check, *, dry: bool) -> str:
    if check.problem:
        return FAIL
    if check.skipped:
        return SKIP
    # Not "above", so that NaN fails.
    if check.bound is not None and not (check.figure is not None and check.figure <= check.bound):
        return FAIL
    if not dry and check.expected and not _share(check) >= SLOW_SHARE:
        return SLOW
    return OK


def _share(check: Check) -> float:
    """Return a result as a fraction of its expectation; the inverse for a size or a time."""
    assert check.expected is not None
    if check.figure is None or check.figure <= 0:
        return 0.0
    if check.at_most:
        return check.expected / check.figure
    return check.figure / check.expected


def line(outcome: Outcome) -> str:
    """Return ``NAME VERDICT seconds result (expected)``."""
    words = outcome.problem
    check = _telling(outcome)
    if check is not None and not (words and not check.problem):
        words = "; ".join(filter(None, [words, f"{check.name}: {shown(check)}{beside(check)}"]))
    counts = ", ".join(f"{outcome.verdicts.count(v)} {v}" for v in _ORDER if v in outcome.verdicts)
    return f"{outcome.name:<10} {outcome.verdict:<4} {outcome.seconds:>4.0f} s  {one_line(words, 230)}  [{counts}]"


def beside(check: Check) -> str:
    """Return a result's bound or expectation in brackets; empty without one."""
    if check.bound is not None:
        return f" (at most {number(check.bound)})"
    if check.expected is not None:
        return f" (expected {number(check.expected)})"
    return ""


def _telling(outcome: Outcome) -> Check | None:
    """Return the most informative check: the first one with the step's own verdict.

    If all are well, it is the check that the step names, or the one closest to its bound.
    """
    alike = [c for c, v in zip(outcome.checks, outcome.verdicts, strict=True) if v == outcome.verdict]
    if outcome.verdict == OK:
        named = [check for check in alike if check.name == outcome.shows]
        nearest = sorted((check for check in alike if check.bound), key=_share_of_bound, reverse=True)
        alike = named or nearest or alike
    return next(iter(alike), None)


def _share_of_bound(check: Check) -> float:
    return (check.figure or 0.0) / (check.bound or 1.0)


def table(outcomes: Sequence[Outcome], most: int = MOST_CHARACTERS) -> str:
    """Return the summary: a line per step, then checks that are not OK, then results with their expectations.

    Lines beyond ``most`` characters are left out from the end; the report in the archive has all of them.
    """
    lines = ["", "step       verdict   result (expected)  [checks]", *map(line, outcomes)]
    wrong, measured = [], []
    for outcome in outcomes:
        for check, verdict in zip(outcome.checks, outcome.verdicts, strict=True):
            text = f"  {verdict:<4} {outcome.name}, {check.name}: {one_line(shown(check), 160)}{beside(check)}"
            if verdict in (FAIL, SLOW, SKIP):
                wrong.append(text)
            elif check.expected is not None:
                measured.append(text)
    if wrong:
        lines += ["", "not OK:", *wrong]
    if measured:
        lines += ["", "measured:", *measured]
    return _cut(lines, most)


def _cut(lines: Sequence[str], most: int) -> str:
    kept, size = [], 0
    for number_of_line, text in enumerate(lines):
        size += len(text) + 1
        if size > most - 60:
            kept.append(f"… {len(lines) - number_of_line} more lines in report.json of the archive")
            break
        kept.append(text)
    return "\n".join(kept)

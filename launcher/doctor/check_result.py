"""Check results printed by ``doctor``, one line each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator

from launcher.wording import format_count

_LONGEST_TEXT = 400


def sanitize_line(text: str) -> str:
    """Return ``text`` as one printable line, truncated to 400 characters."""
    # A terminal would execute escape sequences, and a line break could fake another result.
    plain = "".join(char if char.isprintable() else " " for char in text)
    plain = " ".join(plain.split())
    if len(plain) > _LONGEST_TEXT:
        return f"{plain[:_LONGEST_TEXT]}…"
    return plain


Text = Annotated[str, AfterValidator(sanitize_line)]
"""Text that may come from another machine, reduced to printable characters."""

CheckStatus = Literal["ok", "warn", "fail"]
CHECK_STATUSES: tuple[CheckStatus, ...] = get_args(CheckStatus)
"""From best to worst."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One check's result."""

    check: Text
    verdict: CheckStatus
    """``fail``: a run would not start, or would be wrong. ``warn``: it would be slower, or may end early."""
    value: Text
    advice: Text = ""
    """Recommended fix, or empty."""
    host: str = ""
    """Host name in the hostfile; empty for the machine that ran the check."""

    @classmethod
    def of(cls, check: str, value: str, hint: str = "", status: CheckStatus = "warn") -> CheckResult:
        """Build a result with verdict ``status``, or "ok" if ``hint`` is empty."""
        if not hint:
            status = "ok"
        return cls(check=check, verdict=status, value=value, advice=hint)

    def on(self, host: str) -> CheckResult:
        """Return a copy for ``host``."""
        return replace(self, host=host)


def worst(results: Iterable[CheckResult]) -> CheckStatus:
    """Return the worst verdict; "ok" if there are no results."""
    found = {result.verdict for result in results}
    for status in reversed(CHECK_STATUSES):
        if status in found:
            return status
    return "ok"


def first_line(error: Exception) -> str:
    """Return an error message's first line, without a library's stack; the class name if the message is empty."""
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()
    return type(error).__name__


def format_results(results: Sequence[CheckResult]) -> list[str]:
    """Format one line per result."""
    return [format_result(result, result.check) for result in results]


def format_result(result: CheckResult, subject: str) -> str:
    """Format a result: verdict, subject, value, and the advice after an arrow."""
    line = f"{result.verdict:4}  {subject:15}  {result.value}"
    if result.advice:
        line += f" → {result.advice}"
    return line


def results_summary(results: Sequence[CheckResult]) -> str:
    """Return the closing line with failure and warning counts."""
    counts = {status: sum(result.verdict == status for result in results) for status in CHECK_STATUSES}
    if counts["fail"]:
        return f"{format_count(counts['fail'], 'check')} failed, {format_count(counts['warn'], 'warning')}."
    if counts["warn"]:
        return f"Nothing failed, {format_count(counts['warn'], 'warning')}."
    return "All is well."

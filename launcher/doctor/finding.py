"""Check results printed by ``doctor``, one line each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator

from launcher.wording import plural

_LONGEST_TEXT = 400


def printable(text: str) -> str:
    """Return ``text`` as one printable line, truncated to 400 characters."""
    # A terminal would execute escape sequences, and a line break could fake another result.
    plain = "".join(char if char.isprintable() else " " for char in text)
    plain = " ".join(plain.split())
    if len(plain) > _LONGEST_TEXT:
        return f"{plain[:_LONGEST_TEXT]}…"
    return plain


Text = Annotated[str, AfterValidator(printable)]
"""Text that may come from another machine, reduced to printable characters."""

Verdict = Literal["ok", "warn", "fail"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""From best to worst."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check's result."""

    check: Text
    verdict: Verdict
    """``fail``: a run would not start, or would be wrong. ``warn``: it would be slower, or may end early."""
    value: Text
    advice: Text = ""
    """Recommended fix, or empty."""
    host: str = ""
    """Host name in the hostfile; empty for the machine that ran the check."""

    @classmethod
    def of(cls, check: str, value: str, advice: str = "", verdict: Verdict = "warn") -> Finding:
        """Build a result with this verdict, or with "ok" if ``advice`` is empty."""
        if not advice:
            verdict = "ok"
        return cls(check=check, verdict=verdict, value=value, advice=advice)

    def on(self, host: str) -> Finding:
        """Return a copy for ``host``."""
        return replace(self, host=host)


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict; "ok" if there are no results."""
    found = {finding.verdict for finding in findings}
    for verdict in reversed(VERDICTS):
        if verdict in found:
            return verdict
    return "ok"


def first_line(error: Exception) -> str:
    """Return an error message's first line, without a library's stack; the class name if the message is empty."""
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()
    return type(error).__name__


def lines_of(findings: Sequence[Finding]) -> list[str]:
    """Format one line per result."""
    return [line_of(finding, finding.check) for finding in findings]


def line_of(finding: Finding, subject: str) -> str:
    """Format a result: verdict, subject, value, and the advice after an arrow."""
    line = f"{finding.verdict:4}  {subject:15}  {finding.value}"
    if finding.advice:
        line += f" → {finding.advice}"
    return line


def summary(findings: Sequence[Finding]) -> str:
    """Return the closing line with failure and warning counts."""
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in VERDICTS}
    if counts["fail"]:
        return f"{plural(counts['fail'], 'check')} failed, {plural(counts['warn'], 'warning')}."
    if counts["warn"]:
        return f"Nothing failed, {plural(counts['warn'], 'warning')}."
    return "All is well."

"""Findings of ``doctor``, one line each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator

from launcher.wording import plural

_LONGEST_TEXT = 400


def printable(text: str) -> str:
    """Return one line of ``text`` without control characters, cut if it is very long."""
    # A terminal would execute escape sequences, and a line break could fake another finding.
    plain = "".join(char if char.isprintable() else " " for char in text)
    plain = " ".join(plain.split())
    if len(plain) > _LONGEST_TEXT:
        return f"{plain[:_LONGEST_TEXT]}…"
    return plain


Text = Annotated[str, AfterValidator(printable)]
"""Text that may come from another machine, whose printable characters alone are kept."""

Verdict = Literal["ok", "warn", "fail"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""From the best to the worst."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check."""

    check: Text
    verdict: Verdict
    """``fail``: a run would not start, or would be wrong. ``warn``: it would be slower, or may end early."""
    value: Text
    advice: Text = ""
    """What to do; empty where there is nothing."""
    host: str = ""
    """Host of the hostfile; empty for the machine that was asked."""

    @classmethod
    def of(cls, check: str, value: str, advice: str = "", verdict: Verdict = "warn") -> Finding:
        """Return a finding with this verdict, or with "ok" if there is no advice."""
        if not advice:
            verdict = "ok"
        return cls(check=check, verdict=verdict, value=value, advice=advice)

    def on(self, host: str) -> Finding:
        """Return the same finding for ``host``."""
        return replace(self, host=host)


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict; "ok" if there are no findings."""
    found = {finding.verdict for finding in findings}
    for verdict in reversed(VERDICTS):
        if verdict in found:
            return verdict
    return "ok"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without a library's stack; its class name if it is empty."""
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()
    return type(error).__name__


def lines_of(findings: Sequence[Finding]) -> list[str]:
    """Return a line for each finding."""
    return [line_of(finding, finding.check) for finding in findings]


def line_of(finding: Finding, subject: str) -> str:
    """Return the line of a finding: verdict, subject, value, and the advice after an arrow."""
    line = f"{finding.verdict:4}  {subject:15}  {finding.value}"
    if finding.advice:
        line += f" → {finding.advice}"
    return line


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line, with the numbers of failures and warnings."""
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in VERDICTS}
    if counts["fail"]:
        return f"{plural(counts['fail'], 'check')} failed, {plural(counts['warn'], 'warning')}."
    if counts["warn"]:
        return f"Nothing failed, {plural(counts['warn'], 'warning')}."
    return "All is well."

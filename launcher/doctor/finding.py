"""One line of what ``doctor`` says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from longctx.errors import ClusterError

Verdict = Literal["ok", "warn", "fail"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""From the best to the worst."""
_LONGEST_TEXT = 400


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found."""

    check: str
    verdict: Verdict
    """``fail``: a run would not start, or would be wrong. ``warn``: it would be slower, or may end early."""
    value: str
    advice: str = ""
    """What to do; empty where there is nothing."""
    host: str = ""
    """Host of the hostfile; empty for the machine that was asked."""

    def on(self, host: str) -> Finding:
        """The same, found on ``host``."""
        return replace(self, host=host)

    def to_json(self) -> dict[str, str]:
        """All fields by name."""
        return asdict(self)


def worst(findings: Iterable[Finding]) -> Verdict:
    """The worst verdict; "ok" where there is no finding."""
    found = {finding.verdict for finding in findings}
    for verdict in reversed(VERDICTS):
        if verdict in found:
            return verdict
    return "ok"


def finding_from_json(value: Any) -> Finding:
    """The finding that another machine wrote as JSON. ClusterError where it is none.

    That text is shown on a terminal, so that only its printable characters are kept.
    """
    names = ("check", "verdict", "value", "advice")
    if not isinstance(value, dict) or not all(isinstance(value.get(name), str) for name in names):
        raise ClusterError("a finding without check, verdict, value and advice")
    if value["verdict"] not in VERDICTS:
        raise ClusterError(f"a finding with an unknown verdict {printable(value['verdict'])!r}")
    # The host's name is ours to say, so it is not taken from the answer.
    return Finding(
        check=printable(value["check"]),
        verdict=value["verdict"],
        value=printable(value["value"]),
        advice=printable(value["advice"]),
    )


def first_line(error: Exception) -> str:
    """Return the first line of an error, because libraries add a stack; its class if it says nothing."""
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()
    return type(error).__name__


def printable(text: str) -> str:
    """One line of ``text`` without control characters, cut where it is very long."""
    # A terminal obeys escape sequences, and a line break would look like a finding of ours.
    plain = "".join(char if char.isprintable() else " " for char in text)
    plain = " ".join(plain.split())
    if len(plain) > _LONGEST_TEXT:
        return f"{plain[:_LONGEST_TEXT]}…"
    return plain

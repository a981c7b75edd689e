"""Findings as lines of one screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.doctor.finding import VERDICTS, Finding
from launcher.doctor.hosts import Host
from launcher.doctor.remote import Answer
from launcher.wording import first_names, plural


def lines_of(findings: Iterable[Finding]) -> list[str]:
    """A line for each finding: verdict, check, value, and after an arrow what to do."""
    return [_line(finding, finding.check) for finding in findings]


def lines_of_hosts(hosts: Sequence[Host]) -> list[str]:
    """A line for each host without trouble; a line for each warning and failure, once for all hosts that share it."""
    lines = [_healthy(host) for host in hosts if all(finding.verdict == "ok" for finding in host.findings)]
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in (finding for host in hosts for finding in host.findings):
        if finding.verdict != "ok":
            # Values differ a little between machines (seconds, bytes); what to do does not.
            groups.setdefault((finding.verdict, finding.check, finding.advice), []).append(finding)
    # The worst stands last, next to the prompt.
    for verdict in VERDICTS:
        lines += [_shared(group) for key, group in groups.items() if key[0] == verdict]
    return lines


def summary(findings: Sequence[Finding]) -> str:
    """The last line: how many failed and warned."""
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in VERDICTS}
    if counts["fail"]:
        return f"{plural(counts['fail'], 'check')} failed, {plural(counts['warn'], 'warning')}."
    if counts["warn"]:
        return f"Nothing failed, {plural(counts['warn'], 'warning')}."
    return "All is well."


def _line(finding: Finding, subject: str) -> str:
    line = f"{finding.verdict:4}  {subject:15}  {finding.value}"
    if finding.advice:
        line += f" → {finding.advice}"
    return line


def _healthy(host: Host) -> str:
    """A host of which every finding is ok, in one line."""
    assert isinstance(host.answer, Answer), "no answer is a failure"
    said = [finding.value for finding in host.findings if finding.check in ("ssh", "versions", "clock", "slots")]
    return f"ok    {host.name:15}  {'; '.join(said)}; the same code and folder"


def _shared(group: Sequence[Finding]) -> str:
    """One line for a finding of several hosts; the value is the first one's."""
    names = first_names([finding.host for finding in group], most=4)
    return _line(group[0], f"{group[0].check} on {names}")

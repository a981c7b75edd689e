"""Report section on wrong numbers: audit and replica findings, with the ranks involved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.metrics.record import AUDIT_EVENT, DISCARDED_FILE, Record, readable_records
from launcher.report.html import Section, Table
from launcher.wording import plural

MAX_FINDINGS = 20
"""Maximum table rows: the latest findings."""
_MAX_REMARKS = 3
"""Maximum steps named at the head of the page."""


def audit_events(folder: Path, records: Sequence[Record]) -> list[Record]:
    """Return a run's wrong-number events by step, including steps repeated since then."""
    found = [record for record in records if record.get("event") == AUDIT_EVENT]
    # A resume from an earlier checkpoint discards the event, but the machine is as suspect as before.
    for record in readable_records(folder / DISCARDED_FILE, f'"{AUDIT_EVENT}"'):
        # A killed resume may have discarded the same line twice.
        if record.get("event") == AUDIT_EVENT and record not in found:
            found.append(record)
    return sorted(found, key=lambda record: (record["step"], record.get("time", "")))


def audit_remarks(events: Sequence[Record]) -> list[str]:
    """Return one remark per step with wrong numbers, for the latest steps."""
    lines = []
    for event in events[-_MAX_REMARKS:]:
        findings = event.get("findings") or [{}]
        more = ""
        # The head names one finding per step; the table below has the others.
        if len(findings) > 1:
            more = f", and {plural(len(findings) - 1, 'more finding')}"
        lines.append(
            f"A wrong number was found in step {event['step']:,}: {_who(findings[0])}{more}. See Wrong numbers, below."
        )
    if len(events) > _MAX_REMARKS:
        lines.insert(0, f"Wrong numbers were found in {len(events)} steps; the last {_MAX_REMARKS} follow.")
    return lines


def audit_sections(events: Sequence[Record]) -> list[Section]:
    """Return a table with one row per finding; empty if no wrong number was ever found."""
    rows = [_row(event, finding) for event in events for finding in event.get("findings") or []]
    if not rows:
        return []
    caption = (
        "Each ended the run. Test the machines that are named before you use them again; earlier steps of theirs may "
        "have been wrong too."
    )
    if len(rows) > MAX_FINDINGS:
        caption = f"The last {MAX_FINDINGS} of {len(rows)}. {caption}"
    headings = ("Step", "Who", "What", "Values that differ", "Why it is known")
    return [Section(title="Wrong numbers", caption=caption, table=Table(headings=headings, rows=rows[-MAX_FINDINGS:]))]


def _who(finding: dict[str, Any]) -> str:
    """Name the wrong rank, or all ranks among which one was wrong, with their machines."""
    ranks, hosts = finding.get("ranks") or [], finding.get("hosts") or []
    if not ranks:
        return "by an unknown rank"
    on = [f"{rank} on {host}" for rank, host in zip(ranks, hosts, strict=False)] or [str(rank) for rank in ranks]
    if len(ranks) == 1:
        return f"rank {on[0]}"
    return f"one of the ranks {', '.join(on)}"


def _row(event: Record, finding: dict[str, Any]) -> tuple[str, ...]:
    differing = "–"
    if finding.get("values") is not None:
        differing = f"{finding['values']:,} of {finding.get('of_values', 0):,}"
        bits = finding.get("bits") or []
        if bits:
            differing += f", in bit{'s' * (len(bits) > 1)} {', '.join(map(str, bits[:8]))}"
            differing += "…" * (len(bits) > 8)
    return (
        f"{event['step']:,}",
        _who(finding),
        str(finding.get("what", "")),
        differing,
        str(finding.get("evidence", "")),
    )

"""Report section on wrong numbers: audit and replica findings, with the ranks involved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.metrics.record import AUDIT_EVENT, DISCARDED_FILE, Record, readable_records
from launcher.report.html import Section, Table
from launcher.wording import format_count

MAX_ROWS = 20
"""Maximum table rows: the latest findings."""
_MAX_WARNINGS = 3
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


def audit_warnings(events: Sequence[Record]) -> list[str]:
    """Return one remark per step with wrong numbers, for the latest steps."""
    lines = []
    for event in events[-_MAX_WARNINGS:]:
        entries = event.get("findings") or [{}]
        suffix = ""
        # The head names one finding per step; the table below has the others.
        if len(entries) > 1:
            suffix = f", and {format_count(len(entries) - 1, 'more finding')}"
        lines.append(
            f"A wrong number was found in step {event['step']:,}: {_who(entries[0])}{suffix}. See Wrong numbers, below."
        )
    if len(events) > _MAX_WARNINGS:
        lines.insert(0, f"Wrong numbers were found in {len(events)} steps; the last {_MAX_WARNINGS} follow.")
    return lines


def audit_sections(events: Sequence[Record]) -> list[Section]:
    """Return a table with one row per finding; empty if no wrong number was ever found."""
    rows = [_row(event, entry) for event in events for entry in event.get("findings") or []]
    if not rows:
        return []
    caption = (
        "Each finding ended the run. Test the named machines before you use them again; their earlier steps may be "
        "wrong, too."
    )
    if len(rows) > MAX_ROWS:
        caption = f"The last {MAX_ROWS} of {len(rows)}. {caption}"
    column_names = ("Step", "Who", "What", "Values that differ", "How it was found")
    return [
        Section(title="Wrong numbers", caption=caption, table=Table(column_names=column_names, rows=rows[-MAX_ROWS:]))
    ]


def _who(entry: dict[str, Any]) -> str:
    """Name the wrong rank, or all ranks among which one was wrong, with their machines."""
    ranks, hosts = entry.get("ranks") or [], entry.get("hosts") or []
    if not ranks:
        return "by an unknown rank"
    on = [f"{rank} on {host}" for rank, host in zip(ranks, hosts, strict=False)] or [str(rank) for rank in ranks]
    if len(ranks) == 1:
        return f"rank {on[0]}"
    return f"one of the ranks {', '.join(on)}"


def _row(event: Record, entry: dict[str, Any]) -> tuple[str, ...]:
    values = "–"
    if entry.get("values") is not None:
        values = f"{entry['values']:,} of {entry.get('of_values', 0):,}"
        bits = entry.get("bits") or []
        if bits:
            values += f", in bit{'s' * (len(bits) > 1)} {', '.join(map(str, bits[:8]))}"
            values += "…" * (len(bits) > 8)
    return (
        f"{event['step']:,}",
        _who(entry),
        str(entry.get("what", "")),
        values,
        str(entry.get("evidence", "")),
    )

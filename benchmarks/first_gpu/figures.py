"""Table in docs/: every expected result with each card's measurement, or "waiting"."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.first_gpu.checks import number
from benchmarks.first_gpu.keep import NAME
from benchmarks.first_gpu.steps import PARTS

WAITING = "waiting"
_COLUMNS = 100


def kept_results(results: Path) -> list[dict[str, Any]]:
    """Return all cards' results, sorted by folder name."""
    return [json.loads(path.read_text()) for path in sorted(results.glob(f"*/{NAME}"))]


def steps_table(results: Path) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows: the verdict on each step."""
    cards = kept_results(results)
    rows = []
    for part, steps in PARTS.items():
        for step in steps:
            rows.append([part, step.name, f"{step.seconds:.0f}", *(_verdict(card, step.name) for card in cards)])
    return _with_waiting(["part", "step", "limit, s"], rows, cards)


def figures_table(results: Path) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows: each expected result; its source is a number in ``sources``."""
    cards, places = kept_results(results), sources()
    rows, seen = [], []
    for steps in PARTS.values():
        for step in steps:
            # The second part measures the machine again, for fractions of its own rates.
            if step.expected in seen:
                continue
            seen.append(step.expected)
            for name, expected in step.expected.items():
                sign = "≤ " if expected.at_most else ""
                told = f"{sign}{number(expected.figure)} [{places.index(expected.source) + 1}]"
                rows.append([step.name, name, told, *(_figure(card, step.name, name) for card in cards)])
    return _with_waiting(["step", "result", "expected"], rows, cards)


def sources() -> list[str]:
    """Return the distinct sources of expected results."""
    expected = [e for steps in PARTS.values() for step in steps for e in step.expected.values()]
    return list(dict.fromkeys(one.source for one in expected))


def source_lines() -> str:
    """Return the sources as a numbered list."""
    lines = []
    for place, source in enumerate(sources(), 1):
        lines += textwrap.wrap(f"{place}. {source}", _COLUMNS, subsequent_indent="   ", break_on_hyphens=False)
    return "\n".join(lines)


def _with_waiting(
    head: list[str], rows: list[list[str]], cards: list[dict[str, Any]]
) -> tuple[list[str], list[list[str]]]:
    if not cards:
        return [*head, "measured"], [[*row, WAITING] for row in rows]
    return head + [f"{card['card']}, {card['machine']['date']}" for card in cards], rows


def _verdict(card: dict[str, Any], name: str) -> str:
    step = card["steps"].get(name)
    if step is None:
        return WAITING
    return f"{step['verdict']}, {step['seconds']:.0f} s"


def _figure(card: dict[str, Any], step: str, name: str) -> str:
    checks = card["steps"].get(step, {}).get("checks", [])
    check = next((check for check in checks if check["name"] == name), None)
    if check is None or check["figure"] is None:
        return WAITING
    verdict = "" if check["verdict"] == "OK" else f" {check['verdict']}"
    return f"{number(check['figure'])}{verdict}"


def last_on_gpu(results: Path, name: str) -> str:
    """Return the cards, dates and verdicts of a benchmark's measurements as text; "waiting" without measurements."""
    told = []
    for path in sorted(results.glob(f"*/{name}.json")):
        result = json.loads(path.read_text())
        words = f"measured on {result['card']}, {result['machine']['date']}"
        verdicts = [step["verdict"] for step in result.get("steps", {}).values()]
        if verdicts:
            counts = (f"{verdicts.count(v)} {v}" for v in ("OK", "SLOW", "FAIL", "SKIP") if v in verdicts)
            words += f": {', '.join(counts)}"
        told.append(words)
    return "; ".join(told) or WAITING

"""Headings and rows for the tables of ``plan``: seconds and memory compared with training, bytes with the trace."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Table = tuple[Sequence[str], list[tuple[str, ...]]]


def of_seconds(result: dict[str, Any]) -> Table:
    """Return the plan's seconds per step, and the training run's."""
    unit = "s"
    if result["cpu_time"]:
        unit = "CPU s"
    head = ("run", "ranks", f"planned, {unit}", f"the run, {unit}", "error", "passed, s")
    rows = []
    for row in result["rows"]:
        name = row["name"]
        if row["held_out"]:
            name += " *"
        passed = max(statistics.median(steps["wall"]) for steps in row["steps"])
        figures = f"{row['planned_seconds']:.2f}", f"{row['measured_seconds']:.2f}", f"{row['error']:+.1%}"
        rows.append((name, f"{row['ranks']}", *figures, f"{passed:.2f}"))
    return head, rows


def of_memory(result: dict[str, Any]) -> Table:
    """Return the plan's bytes per rank, and the training run's resident memory."""
    head = ("run", "ranks", "planned", "the run", "error")
    rows = []
    for row in result["rows"]:
        figures = tuple(f"{row[name] / 2**20:,.0f} MiB" for name in ("planned_bytes", "measured_bytes"))
        name = row["name"]
        if "date" in row:
            name += f" ({row['date']})"
        rows.append((name, f"{row['ranks']}", *figures, f"{row['error']:+.1%}"))
    return head, rows


def of_bytes(result: dict[str, Any]) -> Table:
    """Return the plan's bytes per rank, and the trace's."""
    head = ("run", "layers", "traced: kept + passing", "planned", "error", "traced: peak", "planned", "error")
    rows = []
    for row in result["rows"]:
        layers, cells = "all", []
        if row["few_layers"]:
            layers = "few"
        for names in (("kept", "passing"), ("peak",)):
            traced, planned = (sum(of[name] for name in names) for of in (row, row["planned"]))
            cells += [f"{traced / 2**30:,.1f} GiB", f"{planned / 2**30:,.1f} GiB", f"{planned / traced - 1:+.1%}"]
        rows.append((row["name"], layers, *cells))
    return head, rows


def of_images(result: dict[str, Any]) -> Table:
    """Return KiB per token of models of images and a decoder, traced and planned, and the busiest rank's work."""
    head = ("model", "settings", "KiB per token", "planned", "on the host", "work over mean")
    rows = []
    for row in result["rows"]:
        traced = row["kib_per_token"]
        unit = (row["kept"] + row["passing"]) / traced
        planned = (row["planned"]["kept"] + row["planned"]["passing"]) / unit
        figures = f"{traced:.1f}", f"{planned:.1f}", f"{row['kept_on_host'] / unit:.1f}", f"{row['work_over_mean']:.4f}"
        rows.append((row["model"], row["way"], *figures))
    return head, rows

"""Keep archived results: by card, in the docs' table, and on an H100 as rates in the plan's profile."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.first_gpu.archive import read_member
from benchmarks.gpu import card_key
from benchmarks.machine import RESULTS
from launcher.measure.profile_entry import ProfileEntry
from launcher.plan.hardware import FOLDER, hardware_from_values
from longctx.errors import ConfigError

NAME = "first_gpu.json"
PROFILE = FOLDER / "h100.toml"
_LENGTHS = {"8K": 8192, "32K": 32_768, "128K": 131_072}
_UNMEASURED = "none of them was measured by this project"
_MEASURED = "those that this project measured say so"


def keep(archives: Sequence[Path], results: Path = RESULTS, profile: Path = PROFILE) -> list[str]:
    """Merge archives into their cards' results, later over earlier; return a line per written file.

    ConfigError for an archive from a dry run, which measured nothing.
    """
    from benchmarks import tables

    written = []
    for archive in archives:
        report = json.loads(read_member(archive, "report.json"))
        if report["dry"]:
            raise ConfigError(f"{archive} is of a dry run, which measures nothing. Keep one of a run on a GPU.")
        path = results / card_key(report["card"]) / NAME
        merged = merge(json.loads(path.read_text()) if path.exists() else {}, report)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(merged, indent=1) + "\n")
        written.append(f"kept: {path}")
        if "H100" in report["card"] and (figures := rates_of(merged)):
            profile.write_text(with_rates(profile.read_text(), figures, merged))
            written.append(f"rates: {', '.join(figure.name for figure in figures)} in {profile}")
    if results == RESULTS:
        tables.main([])
    return written


def merge(kept: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the card's result with the report's steps; a step that did not run keeps its earlier result."""
    steps = dict(kept.get("steps", {}))
    for step in report["steps"]:
        if step["verdict"] != "SKIP" or step["name"] not in steps:
            rest = {key: value for key, value in step.items() if key != "name"}
            steps[step["name"]] = rest | {"date": report["machine"]["date"]}
    return {"machine": report["machine"], "card": report["card"], "steps": steps}


def rates_of(result: Mapping[str, Any]) -> list[ProfileEntry]:
    """Return a profile's rates, from checks that were measured and correct."""
    checks: dict[str, float] = {}
    for name in ("machine2", "machine", "attention"):
        for check in result["steps"].get(name, {}).get("checks", []):
            if check["figure"] is not None and check["verdict"] in ("OK", "SLOW"):
                checks[check["name"]] = check["figure"]
    found = []
    for figure, check, unit, what in (
        ("product_flops", "matmul", 1e12, "a product of 8,192³ in bfloat16"),
        ("memory_bandwidth", "copy", 1e12, "a copy of 1 GiB, read and written"),
        ("host_bandwidth", "host link", 1e9, "copies to the host and back at once, a direction"),
    ):
        if check in checks:
            found.append(ProfileEntry.of(figure, checks[check] * unit, what))
    return found + _attention(checks)


def _attention(checks: Mapping[str, float]) -> list[ProfileEntry]:
    """Return both attention tables, for the kernel that ``auto`` tries first: its checks come first."""
    kernel = next((name.split()[0] for name in checks if name.endswith(" forward")), None)
    found = []
    for figure, direction in (("attention_flops", "forward"), ("attention_backward_flops", "backward")):
        rates = {size: checks.get(f"{kernel} {length} {direction}") for length, size in _LENGTHS.items()}
        measured = {size: 1e12 * rate for size, rate in rates.items() if rate is not None}
        if measured:
            what = f"{kernel}, causal documents, 32 query and 8 key heads of 128, bfloat16, {direction}"
            found.append(ProfileEntry(figure, {"length": list(measured)}, what, {"value": list(measured.values())}))
    return found


def with_rates(text: str, figures: Sequence[ProfileEntry], result: Mapping[str, Any]) -> str:
    """Return a profile's text with these sections replaced; it is parsed again as a check."""
    for figure in figures:
        source = (
            f"{figure.description}; measured by benchmarks/first_gpu.sh, {result['card']}, {result['machine']['date']}"
        )
        section = figure.section(source)
        text, number = re.subn(rf"^\[{figure.name}\]\n(?:[^\[\n].*\n)*", lambda _, s=section: s, text, flags=re.M)
        assert number == 1, f"the profile has {number} sections {figure.name}"
    text = text.replace(_UNMEASURED, _MEASURED)
    hardware_from_values(tomllib.loads(text), "h100")
    return text

"""Place and date of a measurement, and the kind of processor.

Three kinds matter, because a library can be fast on one and slow on another: ``plain`` (no bfloat16 instructions, so
bfloat16 is best multiplied in float32), ``bf16`` (AVX512-BF16 or Arm's), and ``amx`` (Intel's matrix units, whose
matmuls take a sixth of the time, so that all other operations weigh more).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from longctx.kernels.processor import has_native_bfloat16

RESULTS = Path(__file__).parent / "results"
KINDS = {
    "plain": "no bfloat16 instructions",
    "bf16": "bfloat16 instructions",
    "amx": "bfloat16 matrix units (AMX)",
}


def processor_kind() -> str:
    """Return the key in ``KINDS`` for this machine's processor."""
    if not has_native_bfloat16():
        return "plain"
    return "amx" if torch.cpu.get_capabilities().get("amx_bf16", False) else "bf16"


def machine() -> dict[str, Any]:
    """Return a description of the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "processor": name,
        "kind": processor_kind(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        **{library: _version(library) for library in ("transformers", "deepspeed")},
        "load_average": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"


def offer_save(parser: argparse.ArgumentParser) -> None:
    """Add ``--save``: without it a benchmark changes neither result files nor, through them, pages in docs/."""
    parser.add_argument("--save", action="store_true", help="keep the results in benchmarks/results, for docs/")


def save(name: str, content: dict[str, Any]) -> Path:
    """Write a result as JSON in the folder for this kind of processor, and return its path."""
    path = RESULTS / processor_kind() / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **content}, indent=1) + "\n")
    return path


def with_saved_rows(name: str, cases: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows by case and seed, merged, in order, with the saved ones for this kind of processor."""
    path = RESULTS / processor_kind() / f"{name}.json"
    known = []
    # Read after the measuring: another process may have saved others meanwhile.
    if path.exists():
        known = json.loads(path.read_text())["rows"]
    found = {(cases.index(row["case"]), row["seed"]): row for row in [*known, *rows]}
    return [found[key] for key in sorted(found)]

"""Attention across ranks beside one process: time, memory, exactness, packed rows.

    python -m benchmarks.attention [--only ring exactness packed] [--quick]

* ring: one causal document, 2 ranks × 1 thread, forward and backward, against half of one process's
  ``scaled_dot_product_attention`` in CPU seconds; and how much resident memory rises.
* exactness: relative (Frobenius) errors of output and gradients against float64, at degrees 1 to 8.
* packed: documents of lognormal lengths (mean 1K) in one row, against the sum of the documents one by one.

CPU seconds are the smallest of rounds in which the methods take turns in the same processes. Exit code 1 when a row is
outside the project's bounds; ``benchmarks/results/attention.json`` keeps the figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from benchmarks.machine import machine, save
from benchmarks.methods import (
    BF16,
    FP32,
    RING,
    Method,
    measure_once,
    measure_time,
    one_process_errors,
    prepare_ours,
    problem,
)

TOKENS = 8192
TIME_BOUND = {FP32: 1.03, BF16: 1.03}
"""CPU seconds of a rank over half of one process's."""
MEMORY_BOUND = {FP32: 242, BF16: 80}
"""MiB that a rank's resident memory rises."""
PACKED_BOUND = 1.15
FP32_ERROR, BF16_ERROR = 5e-7, 1.0e-2
"""Of any fp32 result; of dk and dv in bf16."""
GROWTH = 1.1
"""Largest fp32 error at any degree over that at degree 1: errors that add up hop by hop would be several times it."""
BF16_RATIO = {"out": 1.02, "dq": 1.05, "dk": 1.05, "dv": 1.05}
"""bf16 errors over those of one process's bf16 attention."""


@dataclass(frozen=True)
class Options:
    """How much to measure."""

    rounds: int
    degrees: tuple[int, ...]


QUICK, FULL = Options(2, (1, 3)), Options(8, (1, 2, 3, 4, 8))


def ring(options: Options) -> tuple[list[dict], list[str]]:
    """Two ranks of a zigzag ring on one document: rows, and what is outside the bounds."""
    rows, missed = [], []
    for name in (FP32, BF16):
        asked = problem(name, 0, TOKENS)
        row = measure_once(asked, RING, 2) | measure_time(asked, [RING], 2, options.rounds)[0]
        row |= {"time_bound": TIME_BOUND[name], "memory_bound_mib": MEMORY_BOUND[name]}
        rows.append(row)
        print(
            f"ring, {name}: {row['cpu_seconds_per_rank']} CPU s a rank, one process {row['one_process_cpu_seconds']} "
            f"→ {row['ratio_to_share']:.3f} × half (bound {TIME_BOUND[name]}); "
            f"resident memory +{row['resident_rise_mib']} MiB (bound {MEMORY_BOUND[name]})"
        )
        if row["ratio_to_share"] > TIME_BOUND[name]:
            missed.append(f"ring, {name}: time {row['ratio_to_share']} > {TIME_BOUND[name]} × half")
        if row["resident_rise_mib"] > MEMORY_BOUND[name]:
            missed.append(f"ring, {name}: memory {row['resident_rise_mib']} > {MEMORY_BOUND[name]} MiB")
    return rows, missed


def exactness(options: Options) -> tuple[list[dict], list[str]]:
    """A zigzag ring's errors at every degree, beside one process's."""
    rows: list[dict] = []
    for name in (FP32, BF16):
        for degree in options.degrees:
            parts = 2 * degree  # of a zigzag layout
            row = measure_once(problem(name, 0, TOKENS // parts * parts), RING, degree)
            rows.append(row)
            print(f"exactness, {name}, degree {degree}: {_numbers(row['relative_error'])}")
        asked = problem(name, 0, TOKENS)
        print(f"exactness, {name}, one process: {_numbers(one_process_errors(asked))}")
    return rows, [text for row in rows for text in _inexact(row, rows)]


def _inexact(row: dict, rows: list[dict]) -> list[str]:
    """What of a row is outside the bounds."""
    found: dict[str, float] = row["relative_error"]
    limits: dict[str, float] = {}
    if row["case"] == FP32:
        first = next(r["relative_error"] for r in rows if r["case"] == FP32)
        limits = {n: min(FP32_ERROR, GROWTH * first[n]) for n in found}
    else:
        limits = {n: BF16_RATIO[n] * e for n, e in row["one_process_relative_error"].items()}
        limits |= {n: min(BF16_ERROR, limits[n]) for n in ("dk", "dv")}
    where = f"exactness, {row['case']}, degree {row['degree']}"
    return [f"{where}: {n} {found[n]:.3g} > {limits[n]:.3g}" for n in found if found[n] > limits[n]]


def packed(options: Options) -> tuple[list[dict], list[str]]:
    """Two ranks on a row of many documents, against the documents one by one in one process."""
    documents = lognormal_documents(2 * TOKENS, 1024)
    methods = [Method(f"longctx ring, {kind}", prepare_ours, (kind, "p2p")) for kind in ("zigzag", "balanced")]
    rows, missed = [], []
    for name in (FP32, BF16):
        asked = problem(name, *documents)
        for row in measure_time(asked, methods, 2, 2 * options.rounds):
            rows.append(row | {"time_bound": PACKED_BOUND, "documents": len(documents) - 1})
            print(
                f"packed, {name}, {len(documents) - 1} documents, {row['method']}: {row['cpu_seconds_per_rank']} CPU s "
                f"a rank, one process {row['one_process_cpu_seconds']} → {row['ratio_to_share']:.3f} × half "
                f"(bound {PACKED_BOUND})"
            )
            if row["ratio_to_share"] > PACKED_BOUND:
                missed.append(f"packed, {name}, {row['method']}: time {row['ratio_to_share']} > {PACKED_BOUND} × half")
    return rows, missed


def lognormal_documents(tokens: int, mean: int, sigma: float = 1.0, seed: int = 0) -> tuple[int, ...]:
    """cu_seqlens of a row filled with documents of lognormal lengths, the last one cut off at its end."""
    g = torch.Generator().manual_seed(seed)
    mu = torch.tensor(float(mean)).log().item() - sigma**2 / 2
    drawn = torch.empty(4 * tokens // mean + 16).log_normal_(mu, sigma, generator=g).round().clamp(min=1).int().tolist()
    assert sum(drawn) >= tokens
    return (*(end for end in accumulate(drawn, initial=0) if end < tokens), tokens)


def _numbers(of: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2e}" for name, value in of.items())


TABLES: dict[str, Callable[[Options], tuple[list[dict], list[str]]]] = {
    "ring": ring,
    "exactness": exactness,
    "packed": packed,
}


def main() -> int:
    """Print the tables, save them, and fail when a bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TABLES), default=list(TABLES), help="tables to measure")
    parser.add_argument("--quick", action="store_true", help="few rounds and degrees; nothing is saved")
    options = parser.parse_args()
    print(machine())
    content: dict[str, Any] = {"tokens": TOKENS}
    missed: list[str] = []
    for name in options.only:
        content[name], outside = TABLES[name](QUICK if options.quick else FULL)
        missed += outside
    if not options.quick and options.only == list(TABLES):
        print(f"saved {save('attention', content)}")
    for text in missed:
        print(f"outside the bounds: {text}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

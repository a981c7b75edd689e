"""Attention across ranks, compared with one process: time, memory, exactness, packed rows.

    python -m benchmarks.attention [--only ring both-sides exactness packed] [--quick]

* ring: one causal document, 2 ranks × 1 thread, forward and backward, compared in CPU seconds with half of one
  process's ``scaled_dot_product_attention`` and with the rank's KV blocks alone (``benchmarks/blocks.py``); and the
  increase in resident memory.
* both-sides: the same in float32 without a causal mask (an encoder's attention), in a contiguous ring.
* exactness: relative (Frobenius) errors of output and gradients against float64, at degrees 1 to 8.
* packed: documents with lognormal lengths (mean 1K) in one row, compared with the sum over single documents.

CPU seconds are the minimum over rounds in which the methods take turns in the same processes. Exit code 1 if a row is
outside its bounds; ``benchmarks/results/KIND/attention.json`` keeps the results.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from benchmarks.bounds import Bound, conclude, of_kind, parse
from benchmarks.methods import (
    BF16,
    FP32,
    NAMES,
    RING,
    measure_once,
    measure_time,
    one_process_errors,
    problem,
    ring_method,
)
from longctx.kernels.processor import has_native_bfloat16
from parallel.layout import SequenceLayout
from parallel.schedule import Schedule

TOKENS = 8192
TIME_BOUND = of_kind(plain=1.03, bf16=1.03, amx=1.05)
"""A rank's CPU seconds over half of one process's. With AMX, merging and sending took 0.04 s of a rank's 1.15 s, and
its KV blocks alone take as long as half of PyTorch's attention; on other kinds they take less.
"""
NATIVE_RING_BOUND, NATIVE_KERNEL_BOUND = of_kind(plain=1.05, bf16=1.05, amx=1.08), 1.1
"""The same limit split in two on processors with bfloat16 instructions: a rank over its KV blocks alone, and these over
half.
"""
NATIVE_PACKED_RING_BOUND = 1.1
"""The first of these limits on packed rows, which have half the work for the same merging and sending."""
SLOW_BFLOAT16 = 0.6
"""The same limit on processors for which PyTorch's bfloat16 attention takes two to five times as long as the float32 in
which we compute.
"""
MEMORY_BOUND = {FP32: 242, BF16: 80}
"""Increase in a rank's resident memory, MiB."""
BOTH_SIDES_BOUND = 1.04
"""A rank's CPU seconds over half of one process's, without a causal mask."""
PACKED_BOUND = 1.15
"""The worst rank's CPU seconds over half of one process's, per unit of the layout's imbalance."""
_OVER_SHARE = "CPU seconds over half of one process's"
_OVER_BLOCKS = "CPU seconds over the rank's blocks alone"
_BLOCKS_OVER_SHARE = "CPU seconds of the blocks alone over half of one process's"
FP32_ERROR, BF16_ERROR = 5e-7, 1.0e-2
"""Limit on any fp32 error, and on dk and dv errors in bf16."""
GROWTH = 1.1
"""Largest fp32 error at any degree over that at degree 1: an error that accumulates per hop would exceed it several
times.
"""
BF16_RATIO = {"out": 1.02, "dq": 1.05, "dk": 1.05, "dv": 1.05}
"""bf16 errors over those of one process's bf16 attention."""
BF16_ROUNDING = 2**-8 / 3**0.5
"""Most that rounding to bfloat16 adds to a relative error: numbers between two powers of two are spread evenly, so
the error is the unit roundoff 2^-8 over √3 at most."""


@dataclass(frozen=True)
class Options:
    """How much to measure."""

    rounds: int
    degrees: tuple[int, ...]


QUICK, FULL = Options(2, (1, 3)), Options(8, (1, 2, 3, 4, 8))


def ring(options: Options) -> tuple[list[dict], list[Bound]]:
    """Measure two ranks in a zigzag ring on one document; return rows and their bounds."""
    rows, bounds = [], []
    for name in (FP32, BF16):
        asked = problem(name, 0, TOKENS)
        row = measure_once(asked, RING, 2) | measure_time(asked, [RING], 2, options.rounds)[0]
        case = f"ring, {name}"
        here = [
            *time_bounds(case, row),
            Bound("MiB of resident memory", row["resident_rise_mib"], MEMORY_BOUND[name], case),
        ]
        rows.append(row)
        bounds += here
        print(
            f"{case}: {_times(row)}; resident memory +{row['resident_rise_mib']} MiB (bound {MEMORY_BOUND[name]})",
            flush=True,
        )
    return rows, bounds


def both_sides(options: Options) -> tuple[list[dict], list[Bound]]:
    """Measure two ranks in a contiguous ring on one document without a causal mask; return a row and its bounds."""
    asked, case = replace(problem(FP32, 0, TOKENS), causal=False), f"both sides, {FP32}"
    (row,) = measure_time(asked, [ring_method("contiguous")], 2, options.rounds)
    print(f"{case}: {_times(row)}", flush=True)
    why = "a rank does half of the work, and sending costs next to nothing"
    again = ("--only", "both-sides")
    return [row | {"case": case}], [Bound(_OVER_SHARE, row["ratio_to_share"], BOTH_SIDES_BOUND, case, why, again=again)]


def time_bounds(case: str, row: dict, imbalance: float = 1.0, packed: float | None = None) -> Iterator[Bound]:
    """Return a row's time bounds; ``packed`` replaces the bound for one document."""
    again = ("--only", "packed" if packed else "ring")
    uneven = f"; the busiest rank has {imbalance:.3f} × the mean work under this layout" if imbalance > 1 else ""
    limit = (packed or TIME_BOUND) * imbalance
    if row["case"] == FP32:
        why = "a rank does half of the work, and sending costs next to nothing" + uneven
        yield Bound(_OVER_SHARE, row["ratio_to_share"], round(limit, 3), case, why, again=again)
    elif not has_native_bfloat16():
        why = "without bfloat16 instructions PyTorch's own bfloat16 attention, which is the measure, is slow" + uneven
        yield Bound(_OVER_SHARE, row["ratio_to_share"], round(SLOW_BFLOAT16 * limit, 3), case, why, again=again)
    else:
        why = "merging hops, adding up dq and sending come on top of the kernel on the same KV blocks, all in float32"
        over_blocks = NATIVE_PACKED_RING_BOUND if packed else NATIVE_RING_BOUND
        yield Bound(_OVER_BLOCKS, row["ratio_to_blocks"], over_blocks, case, why, again=again)
        # Cutting a packed row costs the same in either dtype; the kernel's own sums are added.
        limit *= NATIVE_KERNEL_BOUND / TIME_BOUND
        why = "gradients of tiles are added up in float32, those of PyTorch's own attention in bfloat16" + uneven
        yield Bound(_BLOCKS_OVER_SHARE, row["blocks_ratio_to_share"], round(limit, 3), case, why, again=again)


def _times(row: dict) -> str:
    return (
        f"{row['cpu_seconds_per_rank']} CPU s a rank, one process {row['one_process_cpu_seconds']} → "
        f"{row['ratio_to_share']:.3f} × half; KV blocks alone {row['blocks_cpu_seconds_per_rank']} → "
        f"{row['ratio_to_blocks']:.3f} × these"
    )


def exactness(options: Options) -> tuple[list[dict], list[Bound]]:
    """Measure a zigzag ring's errors at every degree, compared with one process's."""
    rows: list[dict] = []
    for name in (FP32, BF16):
        for degree in options.degrees:
            parts = 2 * degree  # for a zigzag layout
            row = measure_once(problem(name, 0, TOKENS // parts * parts), RING, degree)
            rows.append(row)
            print(f"exactness, {name}, degree {degree}: {_numbers(row['relative_error'])}", flush=True)
        asked = problem(name, 0, TOKENS)
        print(f"exactness, {name}, one process: {_numbers(one_process_errors(asked))}")
    return rows, [bound for row in rows for bound in _exactness_bounds(row, rows)]


def _exactness_bounds(row: dict, rows: list[dict]) -> Iterator[Bound]:
    found: dict[str, float] = row["relative_error"]
    alone: dict[str, float] = row["one_process_relative_error"]
    case = f"exactness, {row['case']}, degree {row['degree']}"
    for n in NAMES:
        if row["case"] == FP32:
            first = next(r["relative_error"] for r in rows if r["case"] == FP32)
            limit, why = min(FP32_ERROR, GROWTH * first[n]), "errors do not add up hop by hop"
        else:
            limit, why = bfloat16_error_bound(n, alone[n], merged=row["degree"] > 1)
        yield Bound(f"error of {n}", found[n], limit, case, why)


def bfloat16_error_bound(name: str, alone: float, *, merged: bool) -> tuple[float, str]:
    """Return the limit on a bf16 error if one process's error is ``alone``, and the reason."""
    if name == "out" and merged and has_native_bfloat16():
        why = (
            "the kernel multiplies in bfloat16 and rounds the output of every hop; hops' weights add up to 1, so that "
            "any number of independent roundings adds one more at most: √(one process's² + (2^-8/√3)²)"
        )
        return math.hypot(alone, BF16_ROUNDING), why
    limit = BF16_RATIO[name] * alone
    return (min(BF16_ERROR, limit) if name in ("dk", "dv") else limit), "no worse than one process's bf16 attention"


def packed(options: Options) -> tuple[list[dict], list[Bound]]:
    """Measure two ranks on a row with many documents, compared with the documents one by one in one process."""
    documents = lognormal_documents(2 * TOKENS, 1024)
    methods = {kind: ring_method(kind) for kind in ("zigzag", "balanced")}
    rows, bounds = [], []
    for name in (FP32, BF16):
        asked = problem(name, *documents)
        timed = measure_time(asked, list(methods.values()), 2, 2 * options.rounds)
        for kind, row in zip(methods, timed, strict=True):
            layout = SequenceLayout.build(kind, asked.tokens, 2, documents)
            imbalance = Schedule.build(layout, documents).imbalance()
            case = f"packed, {name}, {kind}"
            bounds += time_bounds(case, row, imbalance, PACKED_BOUND)
            rows.append(row | {"documents": len(documents) - 1, "imbalance": round(imbalance, 3)})
            print(f"{case}, {len(documents) - 1} documents: {_times(row)}", flush=True)
    return rows, bounds


def lognormal_documents(tokens: int, mean: int, sigma: float = 1.0, seed: int = 0) -> tuple[int, ...]:
    """Return cu_seqlens for a row filled with documents of lognormal lengths, the last one cut off at the row's end."""
    g = torch.Generator().manual_seed(seed)
    mu = torch.tensor(float(mean)).log().item() - sigma**2 / 2
    drawn = torch.empty(4 * tokens // mean + 16).log_normal_(mu, sigma, generator=g).round().clamp(min=1).int().tolist()
    assert sum(drawn) >= tokens
    return (*(end for end in accumulate(drawn, initial=0) if end < tokens), tokens)


def _numbers(of: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2e}" for name, value in of.items())


TABLES: dict[str, Callable[[Options], tuple[list[dict], list[Bound]]]] = {
    "ring": ring,
    "both-sides": both_sides,
    "exactness": exactness,
    "packed": packed,
}


def main() -> int:
    """Print and save the tables; return 1 if a bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TABLES), default=list(TABLES), help="tables to measure")
    options = parse(parser, quick="few rounds and degrees")
    content: dict[str, Any] = {"tokens": TOKENS}
    bounds: list[Bound] = []
    for name in options.only:
        content[name], stated = TABLES[name](QUICK if options.quick else FULL)
        bounds += stated
    return conclude("attention", content, bounds, options, whole=set(options.only) == set(TABLES))


if __name__ == "__main__":
    sys.exit(main())

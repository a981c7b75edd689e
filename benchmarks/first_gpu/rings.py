"""Step rings: a ring's ranks one after the other on one GPU: compared with float64, and timed against one call.

Transfers are left out: keys are in place as if they had arrived.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

from benchmarks.first_gpu.checks import Job, Sheet, run_step
from benchmarks.gpu_attention import compare_rings, full_setting, measure_rings, tiny_setting

_SECONDS = 18.0


def run(job: Job, sheet: Sheet) -> None:
    """Compare degrees 2 to 8, then time one document by degree."""
    setting = job.pick(full_setting, lambda: tiny_setting("cpu"))()
    # 1,680 tokens are full token chunks in every layout at every degree, and float64 on the CPU takes seconds for them.
    small = replace(setting, ring_tokens=job.pick(1680, 240), degrees=job.pick(tuple(range(2, 9)), (2, 3)))
    small = replace(small, num_heads=8, num_kv_heads=2)
    for number, (name, kernel) in enumerate(small.kernels().items()):
        # FlexAttention compiles, and cuDNN plans, for each pair of lengths: only the first kernel runs all degrees.
        if name == "flex":
            continue
        if number:
            small = replace(small, degrees=(2,))
        with sheet.attempt(f"{name} beside float64"):
            worst = max(compare_rings(small, kernel), key=lambda row: row["worst"])
            where = f"{worst['of']}, {worst['layout']}, {worst['ranks']} ranks, {worst['documents']}"
            sheet.add(f"{name} beside float64", worst["worst"], bound=1.5e-2, note=where)
    with sheet.attempt("least efficiency"):
        rows = list(measure_rings(replace(setting, rounds=1), monotonic() + _SECONDS))
        least = min(rows, key=lambda row: row["efficiency"])
        for row in rows:
            name = f"{row['layout']}, {row['ranks']} ranks, {row['documents']}, efficiency"
            sheet.add(name, row["efficiency"], unit="of one call", note=f"slowest rank {row['slowest']:.3f}")
        where = f"{least['layout']}, {least['ranks']} ranks, {least['documents']}"
        sheet.add("least efficiency", least["efficiency"], unit="of one call", note=where)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the step as a command."""
    return run_step(run, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

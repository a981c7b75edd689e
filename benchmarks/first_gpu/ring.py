"""Step ring: ranks on one GPU over NCCL: ``verify`` at several degrees, and ZeRO 2 with and without overlap.

Results are correct or wrong here as on several GPUs; times mean nothing, because the ranks take turns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.first_gpu.checks import Job, Sheet, run_step
from benchmarks.first_gpu.commands import common, flags, steps_of
from benchmarks.first_gpu.data import rows_folder
from benchmarks.first_gpu.ranks import run_ranks
from benchmarks.first_gpu.verify import agreement

_FP32 = {"train.dtype": "float32", "parallel.kernel": "blockwise"}
_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks, fp32": (2, {"parallel.context": 2, **_FP32}),
    "4 ranks, zigzag, bf16": (4, {"parallel.context": 4, "parallel.layout": "zigzag", "train.dtype": "bfloat16"}),
    "4 ranks, ring x Ulysses, experts, ZeRO 3, fp32": (
        4,
        {"parallel.context": 4, "parallel.ulysses": 2, "parallel.expert": 2, "zero.stage": 3, **_FP32},
    ),
}
_STEPS = 20


def run(job: Job, sheet: Sheet) -> None:
    """Run the cases one after the other: ranks of two cases would wait for each other's time slices."""
    *first, last = _CASES
    for name in first:
        compare(job, sheet, name)
    with sheet.attempt("ZeRO 2 overlap"):
        overlap(job, sheet)
    compare(job, sheet, last)


def compare(job: Job, sheet: Sheet, name: str) -> None:
    """Run ``verify`` on a case's ranks."""
    ranks, settings = _CASES[name]
    with sheet.attempt(name):
        words = ["launcher/verify.py", *flags(common(job) | settings)]
        sheet.add(name, note=agreement(run_ranks(ranks, words, seconds=job.pick(40, 800))))


def overlap(job: Job, sheet: Sheet) -> None:
    """Compare 20 steps of two data ranks that reduce gradients during backward with 20 that reduce them after it.

    A bucket is smaller than most gradients, so a gradient might be freed while it is still being sent. Without that
    error, both differ at most by the order of sums; a wrong gradient changes its norm at once.
    """
    found = []
    for way in ("on", "off"):
        folder = job.scratch / f"overlap_{way}"
        settings = common(job) | {
            "data.train": rows_folder(job, "32K"),
            "run.output_dir": folder,
            "train.dtype": "bfloat16",
            "data.seq_len": 256,
            "train.tokens_per_step": 512,
            "train.steps": _STEPS,
            "train.warmup_steps": 2,
            "parallel.deterministic": "true",
            "zero.stage": 2,
            "zero.overlap_comm": way,
            "zero.reduce_bucket_size": 20_000,
            "validation.rows": 0,
            "checkpoint.every_steps": 0,
        }
        run_ranks(2, ["launcher/pretrain.py", *flags(settings)], seconds=job.pick(40, 800))
        found.append(steps_of(folder))
    assert [len(steps) for steps in found] == [_STEPS, _STEPS], "a run ended early"
    for what, bound in (("loss", 5e-3), ("grad_norm", 3e-2)):
        error = largest_difference(found, lambda step, of=what: step[of])
        sheet.add(f"ZeRO 2 overlap, {what.replace('_', ' ')}", error, bound=bound, note="largest of 20 steps, relative")


def largest_difference(runs: Sequence[Sequence[dict[str, Any]]], figure: Callable[[dict[str, Any]], float]) -> float:
    """Return the largest relative difference in a metric between two training runs' steps."""
    pairs = zip(*runs, strict=True)
    return max(abs(figure(a) - figure(b)) / max(abs(figure(b)), 1e-30) for a, b in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the step as a command."""
    return run_step(run, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

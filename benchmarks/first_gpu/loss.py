"""Step loss: the head and its loss alone, forward and backward: 32,768 tokens, width 4,096, 128,256 words, bfloat16."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from benchmarks import gpu
from benchmarks.first_gpu.checks import Job, Sheet, run_step
from benchmarks.gpu_attention import full_setting, tiny_setting
from longctx.kernels.cross_entropy import loss_sums
from longctx.kernels.regions import missing_for_compiling, run_with


def run(job: Job, sheet: Sheet) -> None:
    """Measure eager and compiled."""
    setting = job.pick(full_setting, lambda: tiny_setting("cpu"))()
    N, M, V = job.pick((32_768, 4096, 128_256), (64, 32, 500))
    hidden, weight = (torch.randn(rows, M, device=job.device, dtype=torch.bfloat16) / M**0.5 for rows in (N, V))
    hidden.requires_grad_()
    weight.requires_grad_()
    targets = torch.randint(V, (N,), device=job.device)
    ways = {"eager": None, "compiled": "inductor"}
    if (missing := missing_for_compiling(job.device)) is not None:
        sheet.add("compiled", skipped=missing)
        del ways["compiled"]
    for way, compiler in ways.items():
        with sheet.attempt(way):
            # The loss is never compiled on a CPU, so a dry run compiles nothing.
            region = run_with(compiler)

            def step(region=region) -> None:
                hidden.grad = weight.grad = None
                loss_sums(hidden, weight, targets, run=region)[0].backward()

            seconds = gpu.seconds(step, setting)
            rate = 8 * N * M * V / seconds / 1e12
            peak = gpu.peak_bytes(step, setting.device)
            note = f"{rate:.3g} TFLOP/s"
            if peak is not None:
                note += f", {peak / 2**30:.1f} GiB"
            sheet.add(way, 1000 * seconds, unit="ms", note=note)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the step as a command."""
    return run_step(run, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

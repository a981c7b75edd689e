"""Step trace: ``plan --trace``'s memory for the slices, on the CPU and beforehand, for comparison with measurements."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from benchmarks.first_gpu.checks import Job, Sheet, run_step
from benchmarks.first_gpu.commands import LAUNCHER, flags
from benchmarks.first_gpu.commands import run as run_command
from benchmarks.first_gpu.slices import GIB, LENGTHS, Slice, settings_of
from launcher.trace.stand_in import torch_cuda_version

_WITHOUT = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
"""The trace needs no GPU, and leaves it to concurrent steps."""


def run(job: Job, sheet: Sheet) -> None:
    """Trace each slice once: kernels allocate no memory that a trace sees."""
    if torch_cuda_version() is None:
        sheet.add("trace", skipped="this PyTorch is a CPU build; `longctx plan --trace` says what to install")
        return
    for number in range(0, len(LENGTHS), 2):
        with sheet.attempt(f"trace {LENGTHS[number].length}"):
            peak = traced_peak(job, LENGTHS[number])
            for one in LENGTHS[number : number + 2]:
                sheet.add(one.name, peak / GIB, unit="GiB")


def traced_peak(job: Job, one: Slice) -> int:
    """Return the peak bytes of the rank that needs most."""
    settings = settings_of(job, one) | {"run.device": "auto", "parallel.kernel": "auto"}
    text = run_command(
        [*LAUNCHER, "plan", "--trace", "--json", "--ranks", "1", *flags(settings)], seconds=58, environment=_WITHOUT
    )
    # Progress lines may surround the object.
    told, _ = json.JSONDecoder().raw_decode(text, text.index("{\n"))
    return max(rank["bytes"]["peak"] for rank in told["ranks"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the step as a command."""
    return run_step(run, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

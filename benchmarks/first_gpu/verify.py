"""Step verify: the product's own comparison with a plain process, on one rank: float32, bfloat16, compiled, experts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.first_gpu.checks import Job, Sheet, one_line, run_step
from benchmarks.first_gpu.commands import Command, common, flags

AGREED = "They agree"
_DENSE = {"model.preset": "llama-3.1-8b", "data.seq_len": 2048, "train.tokens_per_step": 2048}
_CASES = {
    "fp32": _DENSE | {"train.dtype": "float32", "parallel.kernel": "blockwise"},
    "bf16": _DENSE | {"train.dtype": "bfloat16"},
    "bf16 compiled": _DENSE | {"train.dtype": "bfloat16", "train.compile": "on"},
    "bf16 experts": {"train.dtype": "bfloat16"},
    "bf16 chunks on the host": _DENSE
    | {"train.dtype": "bfloat16", "train.keep": "attention", "train.store": "host", "train.chunk_tokens": 512},
}


def run(job: Job, sheet: Sheet) -> None:
    """Run all cases in parallel: most of their time is starting Python and one process on the GPU."""
    commands = {}
    for name, settings in _CASES.items():
        if name in (job.which or _CASES):
            words = [sys.executable, "launcher/verify.py", *flags(common(job) | settings)]
            commands[name] = Command(words, seconds=job.pick(70, 800), environment={"OMP_NUM_THREADS": "2"})
    for name, command in commands.items():
        with sheet.attempt(name):
            sheet.add(name, note=agreement(command.output()), problem="" if command.code == 0 else command.problem())


def agreement(text: str) -> str:
    """Return the verdict line."""
    return one_line(next((line for line in text.splitlines() if AGREED in line or "differ" in line), "no verdict"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the step as a command."""
    return run_step(run, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Step demo: a shorter ``make demo`` on one GPU: training, a resume, a continuation, an evaluation.

The same training on this machine's CPU, which is tested, gives the expected loss.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.first_gpu.checks import Job, Sheet, one_line, run_step
from benchmarks.first_gpu.commands import LAUNCHER, Command, common, flags, steps_of
from benchmarks.first_gpu.commands import run as run_command
from benchmarks.first_gpu.data import corpus_folder

_PROMPT = "def __init__(self, name, "


def run(job: Job, sheet: Sheet) -> None:
    """Train in two halves, then use the checkpoint, while the CPU's training run continues."""
    steps, folder, beside = job.pick(60, 6), job.scratch / "demo", job.scratch / "demo_cpu"
    cpu = Command([*_train(job, beside, steps), "--run.device", "cpu"], seconds=job.pick(75, 600))
    with sheet.attempt("training"):
        train = _train(job, folder, steps)
        run_command([*train, "--train.stop_after", str(steps // 2)], seconds=job.pick(45, 400))
        run_command([*train, "--run.resume", "latest"], seconds=job.pick(45, 400))
        found = steps_of(folder)
        numbers = [step["step"] for step in found]
        assert numbers == list(range(1, steps + 1)), f"steps {numbers}"
        rate = sorted(step["tokens_per_second"] for step in found)[len(found) // 2]
        sheet.add("training", found[-1]["loss"], unit=f"loss at step {steps}", note=f"{rate:,.0f} tokens/s")
    _use(job, sheet, folder)
    with sheet.attempt("beside the CPU"):
        if problem := cpu.problem():
            raise RuntimeError(problem)
        mine, theirs = (steps_of(each) for each in (folder, beside))
        # Steps at a high learning rate amplify bfloat16's rounding to a few thousandths of the loss. A training run
        # that restarted from scratch in the middle would be off by a tenth and more.
        for name, step in (("loss behind the resume", steps // 2), ("loss at the end", steps - 1)):
            pair = [each[step]["loss"] for each in (mine, theirs)]
            sheet.add(name, abs(pair[0] / pair[1] - 1), bound=2e-2, note=f"{pair[0]:.3f}, on the CPU {pair[1]:.3f}")


def _train(job: Job, folder: Path, steps: int) -> list[str]:
    settings: dict[str, Any] = common(job) | {
        "data.train": corpus_folder(job),
        "run.output_dir": folder,
        "data.seq_len": job.pick(2048, 256),
        "train.tokens_per_step": job.pick(2048, 256),
        "train.dtype": "bfloat16",
        "train.steps": steps,
        "train.warmup_steps": steps // 4,
        "validation.rows": job.pick(8, 1),
    }
    return [sys.executable, "launcher/pretrain.py", *flags(settings)]


def _use(job: Job, sheet: Sheet, folder: Path) -> None:
    """Generate from the checkpoint and evaluate it."""
    with sheet.attempt("generate"):
        words = [*LAUNCHER, "generate", "--checkpoint", str(folder), "--prompt", _PROMPT, "--max-new-tokens", "16"]
        words += ["--dtype", "bfloat16"]
        said = run_command([*words, "--device", job.device], seconds=job.pick(40, 300))
        sheet.add("generate", note=one_line(said, 60))
    with sheet.attempt("evaluate"):
        output = folder / "evaluation"
        words = [*LAUNCHER, "evaluate", "--checkpoint", str(folder), "--tasks", "ppl", "--samples", "2"]
        words += ["--dtype", "bfloat16"]
        words += ["--lengths", str(job.pick(1024, 256)), "--output", str(output), "--device", job.device]
        run_command(words, seconds=job.pick(40, 300))
        sheet.add("evaluate", note=", ".join(sorted(path.name for path in output.iterdir())))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the step as a command."""
    return run_step(run, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Step experts: expert layers compared with dense matmuls, by ``benchmarks/gpu_moe.py``, within its time limit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import gpu_moe
from benchmarks.first_gpu.checks import Job, Sheet, run_step

_MINUTES = 0.5


def run(job: Job, sheet: Sheet) -> None:
    """Measure the layers; each model's best fraction of the dense rate is judged."""
    setting = job.pick(gpu_moe.full_setting, lambda: gpu_moe.tiny_setting("cpu"))()
    # DeepSeek-V3's layer has 22 GB of weights and as much of gradients: the time is for the others.
    setting = replace(setting, models=setting.models[:2], tokens=setting.tokens[:2], rounds=job.pick(3, 1))
    told = gpu_moe.run(setting, _MINUTES)
    for model in setting.models:
        with sheet.attempt(model.name):
            rows = [row for row in told["layers"] if row["model"] == model.name and row["share"] is not None]
            if not rows:
                sheet.add(f"{model.name} share", skipped="out of time, or it does not fit this GPU")
                continue
            best = max(rows, key=lambda row: row["share"])
            note = f"{best['forward_tflops']:.3g} / {best['backward_tflops']:.3g} TFLOP/s at {best['tokens']} tokens"
            sheet.add(f"{model.name} share", best["share"], unit="of the dense rate", note=note)
    for row in told["errors"]:
        worst = max(row[name] for name in ("out", "dx", "dgates", "dgate_up", "ddown"))
        sheet.add(f"{row['model']} error", worst, bound=2e-2)
        sheet.add(f"{row['model']} unchosen", row["unchosen"], unit="largest gradient", bound=0.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the step as a command."""
    return run_step(run, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""The training script with one step under PyTorch's profiler; ``deepspeed`` or ``torchrun`` start it like pretrain.py.

    deepspeed --num_gpus 8 benchmarks/profiled.py --profile profile.json.gz --profiled-step 4 --config …

Rank 0 writes a Chrome trace (chrome://tracing, Perfetto) of that step, and next to it the operations that took longest.
Training ends there, without a checkpoint; without ``--profile`` it ends before that step. A name that ends in .gz is
compressed, to about a fifteenth. Shapes and allocations are recorded only with ``--shapes``: they make the file several
times larger. A step with few layers is as informative as one with all, and its file stays small: ``--model.num_layers
2``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The script's own folder would shadow top-level modules with the same names.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with one step under the profiler; return the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], epilog="All other flags are pretrain.py's.", allow_abbrev=False
    )
    parser.add_argument("--profile", type=Path, help="file of the Chrome trace; its name may end in .gz")
    parser.add_argument("--profiled-step", type=int, default=4, help="the step, counted from 1")
    parser.add_argument("--shapes", action="store_true", help="record shapes and allocations too")
    own, settings = parser.parse_known_args(arguments)
    from launcher.cluster.exit import run_to_exit_code

    return run_to_exit_code(lambda: _train(settings, own.profile, own.profiled_step, shapes=own.shapes))


def _train(settings: list[str], path: Path | None, step: int, *, shapes: bool) -> None:
    import torch

    # DeepSpeed chooses a device when it is imported, which happens earlier here than in normal training.
    accelerator = "cpu"
    if torch.cuda.is_available() and "cpu" not in settings:
        accelerator = "cuda"
    os.environ.setdefault("DS_ACCELERATOR", accelerator)
    from launcher.pretrain import main as pretrain
    from launcher.training import trainer

    trainer.TrainStep = profiled(trainer.TrainStep, path, step, shapes=shapes)  # type: ignore[misc]
    pretrain(settings)


def profiled(plain: type, path: Path | None, step: int, *, shapes: bool = False) -> type:
    """Return a ``TrainStep`` that profiles this step and then ends training; without a path it ends before the step."""
    from torch.profiler import ProfilerActivity, profile

    class ProfiledStep(plain):
        def __call__(self, progress: Any) -> Any:
            if progress.step + 1 != step:
                return super().__call__(progress)
            if path is None:
                raise SystemExit(0)
            on_gpu = self.run.device.type == "cuda"
            activities, by = [ProfilerActivity.CPU], "self_cpu_time_total"
            if on_gpu:
                activities.append(ProfilerActivity.CUDA)
                by = "self_cuda_time_total"
            with profile(activities=activities, record_shapes=shapes, profile_memory=shapes) as recorded:
                super().__call__(progress)
            if self.run.is_rank_0:
                path.parent.mkdir(parents=True, exist_ok=True)
                recorded.export_chrome_trace(str(path))
                table = recorded.key_averages().table(sort_by=by, row_limit=40)
                text = path.with_name(f"{path.name.removesuffix('.gz').removesuffix('.json')}.txt")
                text.write_text(f"{table}\n")
            # Skip the remaining steps, and a checkpoint of many gigabytes.
            raise SystemExit(0)

    return ProfiledStep


if __name__ == "__main__":
    sys.exit(main())

"""Step machine: versions, ``doctor``'s findings, and the rates that other results are fractions of."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch.cuda import nccl

from benchmarks.first_gpu.checks import ROOT, Job, Sheet, one_line, run_step
from launcher.measure.memory_benchmark import benchmark_memory
from launcher.measure.rank_timer import RankTimer
from launcher.measure.sizes import BY_NAME

_LIBRARIES = ("torch", "triton", "deepspeed", "numpy", "pyarrow", "transformers", "psutil", "protobuf", "pytest")


def run(job: Job, sheet: Sheet) -> None:
    """Print versions, then measure matmuls, copies, and the link to the host."""
    with sheet.attempt("versions"):
        sheet.add("versions", note=_versions())
    with sheet.attempt("doctor"):
        sheet.add("doctor", note=_doctor(job))
    clock = RankTimer(torch.device(job.device), round_seconds=0.1)
    with sheet.attempt("matmul"):
        n = job.pick(8192, 256)
        a, b = (torch.randn(n, n, device=job.device, dtype=torch.bfloat16) for _ in range(2))
        sheet.add("matmul", 2 * n**3 / clock.seconds(lambda: a @ b) / 1e12, unit="TFLOP/s", note=f"bfloat16, {n}³")
    with sheet.attempt("copy"):
        x = torch.zeros(job.pick(1 << 30, 1 << 20), dtype=torch.uint8, device=job.device)
        y = torch.empty_like(x)
        sheet.add("copy", 2 * len(x) / clock.seconds(lambda: y.copy_(x)) / 1e12, unit="TB/s", note="read and written")
    with sheet.attempt("host link"):
        sizes = BY_NAME[job.pick("cuda", "smallest")]
        found = {figure.name: figure.values["value"][0] for figure in benchmark_memory(clock, sizes, job.scratch)}
        sheet.add("host link", found["host_bandwidth"] / 1e9, unit="GB/s", note="a direction, both at once")
        for name in ("host_memory_bandwidth", "disk_bandwidth"):
            sheet.add(name, found[name] / 1e9, unit="GB/s")
        for name in ("memory_bytes", "host_memory_bytes"):
            sheet.add(name, found[name] / 2**30, unit="GiB")


def _versions() -> str:
    words = [f"Python {sys.version.split()[0]}"]
    for library in _LIBRARIES:
        try:
            words.append(f"{library} {version(library)}")
        except PackageNotFoundError:
            words.append(f"no {library}")
    words.append(f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    if torch.cuda.is_available():
        words.append(f"NCCL {'.'.join(map(str, nccl.version()))}")
        words.append(_first_line("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"))
    words.append(Path("/proc/meminfo").read_text().partition("\n")[0])
    return ", ".join(words)


def _doctor(job: Job) -> str:
    """Return ``doctor``'s findings that are not ok; it may exit with 1 for something that no step needs."""
    words = [sys.executable, "-m", "launcher", "doctor", "--local", "--no-links", "--folder", str(job.scratch)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=20)
    print(done.stdout + done.stderr)
    told = [text for text in done.stdout.splitlines() if text.split()[:1] in (["warn"], ["fail"])]
    return one_line(f"exit code {done.returncode}; {'; '.join(told)}", 400)


def _first_line(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except OSError:
        return f"no {words[0]}"
    return done.stdout.partition("\n")[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the step as a command."""
    return run_step(run, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

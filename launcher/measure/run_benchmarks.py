"""``benchmark_machine``: start the ranks, collect their measurements, and build the profile."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher.cluster.local_ranks import ROOT, rank_environment
from launcher.measure.profile_entry import ProfileEntry, profile_text
from launcher.plan.hardware import Hardware, hardware_from_values
from longctx import errors
from longctx.errors import ClusterError, ConfigError
from parallel.runtime.listening import free_port

_TIMEOUT_SECONDS = 600.0
_MOST_RANKS = 1024


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """Options for a measurement."""

    ranks: int = 0
    """Concurrent processes; 0 means one per GPU, or one without GPUs."""
    device: str = "auto"
    """"auto", "cpu" or "cuda"."""
    cpu_time: bool = False
    """Count CPU time used by the ranks, excluding other programs."""
    sizes: str = ""
    """Key in ``sizes.BY_NAME``; empty selects the device's own."""


def benchmark_machine(options: BenchmarkOptions, folder: Path, progress: Callable[[str], None]) -> tuple[str, Hardware]:
    """Return this machine's profile, as text and parsed. Disks are measured in ``folder``."""
    ranks = _num_ranks(options)
    with tempfile.TemporaryDirectory() as place:
        entries = _run_ranks(options, ranks, folder, Path(place), progress)
    text = profile_text(_name(options, ranks), _device_type(options), entries, _source_suffix(options, ranks), _NOTES)
    # Parse it as ``plan`` will: a profile that plan would reject is never written.
    return text, hardware_from_values(tomllib.loads(text), "measured")


_NOTES = (
    "Rates of one rank on this machine while the other ranks do the same; `longctx plan --device measured` reads them.",
    "Table rows are the first axis's sizes, columns the second's. Bytes, FLOPs or parameters per second.",
)


def _num_ranks(options: BenchmarkOptions) -> int:
    """Return the number of processes to start; raise ConfigError if this machine cannot run so many."""
    import torch

    gpus = 0
    if options.device != "cpu" and torch.cuda.is_available():
        gpus = torch.cuda.device_count()
    if options.device == "cuda" and gpus < max(options.ranks, 1):
        raise ConfigError(
            f"--device cuda: {max(options.ranks, 1)} ranks need as many GPUs, and torch {torch.__version__} finds "
            f"{gpus}.\nUse --device cpu, or at most that many --ranks."
        )
    if not 0 <= options.ranks <= _MOST_RANKS:
        raise ConfigError(f"--ranks {options.ranks} must be 1 to {_MOST_RANKS}, or 0 for one per GPU.")
    ranks = options.ranks or max(1, gpus)
    if 0 < gpus < ranks and os.environ.get("DS_ACCELERATOR") != "cpu":
        raise ConfigError(
            f"--device {options.device}: {ranks} ranks need as many GPUs, and this machine has {gpus}, which CPU "
            f"ranks would leave idle.\nUse --ranks {gpus}, or --device cpu."
        )
    return ranks


def _run_ranks(
    options: BenchmarkOptions, ranks: int, folder: Path, place: Path, progress: Callable[[str], None]
) -> list[ProfileEntry]:
    rank_options = {
        "device": options.device,
        "cpu_time": options.cpu_time,
        "sizes": options.sizes,
        "folder": str(folder.resolve()),
        "timeout_seconds": _TIMEOUT_SECONDS,
    }
    result, port, workers = place / "figures", free_port(), []
    try:
        for rank in range(ranks):
            workers.append(_start(rank, ranks, port, result, place / f"{rank}.log"))
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(rank_options))
            worker.stdin.close()
        _watch(workers, progress)
    finally:
        # Also after Ctrl-C or a worker's failure: the others would wait for it.
        for worker in workers:
            worker.kill()
            worker.wait()
    return _read(result, ranks, place)


def _start(rank: int, ranks: int, port: int, result: Path, log: Path) -> subprocess.Popen[str]:
    environment = rank_environment(rank, ranks, port) | {
        # Workers import the packages from the same place as this process, in any working folder.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    # Only the worker keeps the log open.
    with log.open("w") as errors_of_rank:
        return subprocess.Popen(
            [sys.executable, "-m", "launcher.measure.rank", str(result)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors_of_rank,
            text=True,
            env=environment,
        )


def _watch(workers: list[subprocess.Popen[str]], progress: Callable[[str], None]) -> None:
    """Report rank 0's lines as progress until all workers have ended or one has failed."""
    assert workers[0].stdout is not None
    for line in workers[0].stdout:
        progress(line.strip())
    # Rank 0 has closed its output, so the others are about to end.
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
        if any(worker.poll() for worker in workers):
            return
        time.sleep(0.02)


def _read(result: Path, ranks: int, place: Path) -> list[ProfileEntry]:
    """Return rank 0's measurements, or raise the first error from any rank."""
    answers: list[dict[str, Any]] = []
    for rank in range(ranks):
        path = result.with_suffix(f".{rank}")
        if path.exists():
            answers.append(json.loads(path.read_text()))
    # User errors come first; other ranks only report their consequences.
    for answer in answers:
        if answer.get("kind"):
            raise getattr(errors, answer["kind"], ClusterError)(answer["error"])
    for answer in answers:
        if "error" in answer:
            raise RuntimeError(f"a benchmark process failed:\n{answer['error']}")
    if not answers:
        log_tail = "\n".join((place / f"{rank}.log").read_text()[-1000:] for rank in range(ranks))
        raise ClusterError(
            f"The benchmark processes ended without a result. Their last output:\n{log_tail.strip()[-2000:]}"
        )
    return [ProfileEntry(**values) for values in answers[0]["figures"]] + [
        ProfileEntry.of("ranks", ranks, "benchmark processes at the same time")
    ]


def _device_type(options: BenchmarkOptions) -> str:
    import torch

    if options.device != "cpu" and torch.cuda.is_available():
        return "cuda"
    return "cpu"


def _name(options: BenchmarkOptions, ranks: int) -> str:
    import torch

    if _device_type(options) == "cuda":
        return f"{torch.cuda.get_device_name(0)}, measured"
    return f"CPU of {socket.gethostname()}, one of {ranks}, measured"


def _source_suffix(options: BenchmarkOptions, ranks: int) -> str:
    seconds = ""
    if options.cpu_time:
        seconds = ", CPU seconds"
    return f"measured, {ranks} at once{seconds}, {datetime.now(UTC):%Y-%m-%d}"

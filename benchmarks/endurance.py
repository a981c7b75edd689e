"""A long training run with small steps: memory, open files, threads and sockets per rank, and log size.

    python -m benchmarks.endurance [--quick]

Two ranks take 50,000 steps with a tiny MoE model in the machine's own dtype, with validation, checkpoints (two are
kept), and metrics for every step. Rows are packed, so token counts per expert and matmul shapes change with every step:
anything that a library or an allocator keeps per shape shows here. Every two seconds each rank's own memory
(``RssAnon`` and ``RssShmem`` in /proc), descriptors, threads and sockets are sampled, and its log's size. The slope is
Theil and Sen's: the median slope between samples, which single peaks do not change. For memory the result is the
increase per step in bytes: at first, from step 500 to 10,000, and from step 20,000 on, to which the bound applies. For
the other counts it is the increase per 10,000 steps over the median. The log has a line per step, like metrics.jsonl;
its late and early bytes per step are compared. ``--save`` writes ``benchmarks/results/KIND/endurance.json``; exit code
1 if a result is outside its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.start import deepspeed, make_shards, started
from launcher.run_folder import LOGS

RANKS = 2
STEPS, QUICK_STEPS = 50_000, 2_000
SETTLED, UNIT = 500, 10_000
"""The first steps do not count; increases are per this many steps."""
FULL, EARLY = 20_000, 10_000
"""From the first step on memory must not grow any more; up to the second it may, as caches and the heap's gaps fill."""
LOOK_SECONDS = 2.0
MOST_RISE = 0.01
MOST_BYTES = 256.0
"""Bytes per step: a training run of a million steps ends with 244 MiB more than at its start."""
KEPT_LOOKS = 60
COUNTS = ("memory_bytes", "descriptors", "threads", "sockets")
NAMES = {"memory_bytes": "memory", "descriptors": "open files", "threads": "threads", "sockets": "sockets"}
RUN: dict[str, Any] = {
    "model.preset": "none",
    "model.vocab_size": 1024,
    "model.hidden_size": 16,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.ffn_size": 32,
    "model.num_experts": 4,
    "model.experts_per_token": 2,
    "model.expert_ffn_size": 32,
    "data.seq_len": 64,
    "train.tokens_per_step": 128,
    "train.warmup_steps": 10,
    "parallel.context": 2,
    "zero.stage": 2,
    "checkpoint.every_steps": 100,
    "checkpoint.keep_last": 2,
    "validation.every_steps": 200,
    "validation.rows": 4,
}

Look = dict[str, float]
"""The step, and a rank's counts at it."""


def measure(steps: int) -> dict[str, Any]:
    """Run it to its end; return the samples per rank."""
    with tempfile.TemporaryDirectory(prefix="longctx-endurance-") as base:
        output = Path(base) / "run"
        keys = {**RUN, "data.train": make_shards(Path(base)), "run.output_dir": output, "train.steps": steps}
        arguments = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        command = deepspeed(*arguments, ranks=RANKS)
        began = time.monotonic()
        with (Path(base) / "console").open("w+") as console:
            with started(command, console) as process:
                looks = _watch(process, output, steps)
            if process.returncode:
                console.seek(0)
                raise RuntimeError(f"the run ended with {process.returncode}:\n{console.read()[-3000:]}")
        return {"steps": steps, "seconds": round(time.monotonic() - began, 1), "ranks": looks}


def _watch(process: subprocess.Popen[str], output: Path, steps: int) -> dict[str, list[Look]]:
    """Sample every rank until the command ends."""
    looks: dict[str, list[Look]] = {str(rank): [] for rank in range(RANKS)}
    metrics, said = output / "metrics.jsonl", 0
    while process.poll() is None:
        time.sleep(LOOK_SECONDS)
        step = _last_step(metrics)
        if step is None:
            continue
        for rank, own in _ranks(process.pid):
            with contextlib.suppress(OSError, psutil.Error):
                looks[rank].append({"step": step, **_counts(own.pid), "log_bytes": _log_bytes(output, rank)})
        if step >= said:
            print(f"step {step:,} of {steps:,}", flush=True)
            said += steps // 10
    return looks


def _last_step(metrics: Path) -> int | None:
    """Return the newest step in metrics.jsonl; None before the first."""
    with contextlib.suppress(OSError):
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 4096))
            lines = file.read().split(b'"step":')
        for text in reversed(lines[1:]):
            number = text.lstrip().split(b",")[0].rstrip(b"}\n ")
            if number.isdigit():
                return int(number)
    return None


def _ranks(launcher: int) -> Iterator[tuple[str, psutil.Process]]:
    """Yield the rank of each rank process below the launcher."""
    for child in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            # Launchers have no rank; processes started by a rank have none on their command line.
            words = child.cmdline()
            if "launcher/pretrain.py" in " ".join(words) and (rank := child.environ().get("RANK")) is not None:
                parent = child.parent()
                if parent is not None and parent.environ().get("RANK") is None:
                    yield rank, child


def _counts(pid: int) -> Look:
    folder = Path(f"/proc/{pid}")
    lines = (folder / "status").read_text().splitlines()
    own = sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    threads = next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))
    opened = []
    for entry in (folder / "fd").iterdir():
        # Closed while they were listed, some are gone.
        with contextlib.suppress(OSError):
            opened.append(str(entry.readlink()))
    sockets = sum(target.startswith("socket:") for target in opened)
    return {"memory_bytes": own, "descriptors": len(opened), "threads": threads, "sockets": sockets}


def _log_bytes(output: Path, rank: str) -> int:
    return sum(path.stat().st_size for path in (output / LOGS).glob(f"rank_{rank}.log*"))


def summary(looks: Sequence[Look]) -> dict[str, dict[str, float]]:
    """Return each count's median, minimum and maximum, and its increase per ``UNIT`` steps over the median."""
    settled = [look for look in looks if look["step"] >= SETTLED]
    found = {}
    for name in COUNTS:
        values = [look[name] for look in settled]
        middle = statistics.median(values)
        points = [(look["step"], look[name]) for look in settled]
        found[name] = {
            "median": middle,
            "least": min(values),
            "most": max(values),
            "rise": UNIT * _slope(points) / middle,
        }
    return found


def memory_growth(looks: Sequence[Look]) -> dict[str, float]:
    """Return the memory growth in bytes per step: at first, and after caches and gaps are full. A quick run uses its
    two halves.
    """
    last = looks[-1]["step"]
    full = min(FULL, last // 2)
    parts = {"early": (SETTLED, min(EARLY, full)), "late": (full, last)}
    return {
        name: _slope([(look["step"], look["memory_bytes"]) for look in looks if begin <= look["step"] <= end])
        for name, (begin, end) in parts.items()
    }


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Return Theil and Sen's slope: the median slope between points half of the series apart."""
    half = len(points) // 2
    slopes = [
        (later[1] - early[1]) / (later[0] - early[0])
        for early, later in zip(points, points[half:], strict=False)
        if later[0] > early[0]
    ]
    return statistics.median(slopes)


def log_growth(looks: Sequence[Look]) -> dict[str, float]:
    """Return the log's bytes per step: in the first half of the samples and in the second."""
    settled = [look for look in looks if look["step"] >= SETTLED]
    middle = len(settled) // 2
    early, late = (
        (part[-1]["log_bytes"] - part[0]["log_bytes"]) / (part[-1]["step"] - part[0]["step"])
        for part in (settled[: middle + 1], settled[middle:])
    )
    return {"early": early, "late": late}


def thinned(looks: Sequence[Look]) -> list[tuple[int, int]]:
    """Return some samples, evenly spaced: step and memory in bytes. They show whether memory stops growing."""
    apart = max(1, len(looks) // KEPT_LOOKS)
    return [(int(look["step"]), int(look["memory_bytes"])) for look in looks[::apart]]


def bounds_of(ranks: dict[str, Any]) -> list[Bound]:
    """Return the bounds on each rank's increases."""
    bounds = []
    for rank, found in ranks.items():
        case, why = f"rank {rank}", "nothing that a step leaves behind may stay"
        bounds.append(Bound("memory: bytes a step, late", found["growth"]["late"], MOST_BYTES, case, why))
        for name in COUNTS[1:]:
            bounds.append(Bound(f"{NAMES[name]}: rise in 10,000 steps", found[name]["rise"], MOST_RISE, case, why))
        log = found["log"]
        # One more digit in the step number is one more byte per line.
        allowed = log["early"] * (1 + MOST_RISE) + 2
        bounds.append(Bound("bytes of its log a step, late", log["late"], allowed, f"rank {rank}", "as early ones"))
    return bounds


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows for a page: each count of each rank."""
    head = ["rank", "memory, MiB: median, least … most", "memory, bytes a step"]
    head += [f"{NAMES[name]}: median, least … most, rise" for name in COUNTS[1:]]
    head.append("log, bytes a step")
    rows = []
    for rank, found in result["ranks"].items():
        cells = [_range(found["memory_bytes"], 1 << 20), f"{found['growth']['early']:+,.0f}, late "]
        cells[-1] += f"{found['growth']['late']:+,.0f}"
        cells += [f"{_range(found[name], 1)}, {found[name]['rise']:+.2%}" for name in COUNTS[1:]]
        rows.append([rank, *cells, f"{found['log']['early']:.0f}, late {found['log']['late']:.0f}"])
    return head, rows


def _range(found: dict[str, float], unit: int) -> str:
    median, least, most = (f"{found[name] / unit:,.0f}" for name in ("median", "least", "most"))
    return f"{median}, {least} … {most}"


def main() -> int:
    """Run the benchmark; return 1 if a result is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse(parser, quick=f"{QUICK_STEPS:,} steps")
    result = measure(QUICK_STEPS if options.quick else STEPS)
    ranks = {
        rank: {
            **summary(looks),
            "growth": memory_growth(looks),
            "log": log_growth(looks),
            "memory": thinned(looks),
        }
        for rank, looks in result.pop("ranks").items()
    }
    for rank, found in ranks.items():
        print(f"rank {rank}: {found}")
    return conclude("endurance", {**result, "ranks": ranks}, bounds_of(ranks), options)


if __name__ == "__main__":
    sys.exit(main())

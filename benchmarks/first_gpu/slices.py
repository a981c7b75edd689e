"""Steps slices, compiled, store, profile, long: two layers of an 8B model by the product's own training script.

The vocabulary is 4,096, so that a step measures layers and not the head. A row is one document. Tokens per second and
MFU are medians over the steps after the first; memory is compared with the plan's and the trace's.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.first_gpu.checks import Job, Sheet, run_step
from benchmarks.first_gpu.commands import common, flags, records, steps_of
from benchmarks.first_gpu.commands import run as run_command
from benchmarks.first_gpu.data import length_of, rows_folder

GIB = 2**30
_CHUNKS = {"train.chunk_tokens": 8192, "train.head_groups": 8}
_DRY_MODEL = {
    "model.preset": "none",
    "model.hidden_size": 64,
    "model.num_heads": 8,
    "model.num_kv_heads": 8,
    "model.head_dim": 8,
    "model.ffn_size": 128,
}


@dataclass(frozen=True)
class Slice:
    """A training run with few layers."""

    name: str
    length: str
    """A key of ``data.LENGTHS``."""
    settings: Mapping[str, Any]
    steps: int = 3
    seconds: float = 40.0
    dry_kernel: str = "auto"


def settings_of(job: Job, one: Slice) -> dict[str, Any]:
    """Return a training run's settings, which its trace uses too."""
    tokens = length_of(job, one.length)
    model = job.pick({"model.preset": "llama-3.1-8b"}, _DRY_MODEL)
    found = common(job) | model | {
        "model.num_layers": 2,
        "model.vocab_size": 4096,
        "data.seq_len": tokens,
        "train.tokens_per_step": tokens,
        "train.dtype": "bfloat16",
        "train.keep": "attention",
        "train.steps": 100,
        "train.warmup_steps": 1,
        "run.memory_check": "false",
        "run.audit_every": 0,
        "validation.rows": 0,
        "checkpoint.every_steps": 0,
    }  # fmt: skip
    found |= one.settings
    if job.dry and "train.chunk_tokens" in one.settings:
        found["train.chunk_tokens"] = tokens // 4
    if job.dry and "parallel.kernel" in one.settings:
        found["parallel.kernel"] = one.dry_kernel
    return found


LENGTHS = tuple(
    Slice(f"{length} {kernel}", length, {"parallel.kernel": kernel}, steps=steps, dry_kernel=dry)
    for length, steps in (("32K", 5), ("128K", 3))
    for kernel, dry in (("auto", "auto"), ("cudnn", "blockwise"))
)
COMPILED = Slice("32K compiled", "32K", {"train.compile": "on"}, steps=5, seconds=58)
STORE = (
    Slice("128K device", "128K", {"train.store": "device", **_CHUNKS}),
    Slice("128K host", "128K", {"train.store": "host", **_CHUNKS}),
)
PROFILED = Slice("profile", "32K", {})
LONG = Slice(
    "1M", "1M",
    {"train.store": "host", "model.num_layers": 1, "parallel.kernel": "cudnn", **_CHUNKS},
    steps=1, seconds=125, dry_kernel="auto",
)  # fmt: skip


def run(job: Job, sheet: Sheet) -> None:
    """Run the selected group of slices."""
    for group in job.which:
        _GROUPS[group](job, sheet)


def lengths(job: Job, sheet: Sheet) -> None:
    """Measure 32K and 128K rows by kernel."""
    for one in LENGTHS:
        with sheet.attempt(one.name):
            measure(job, sheet, one)


def compiled(job: Job, sheet: Sheet) -> None:
    """Measure 32K compiled: the first step, the rate after it, and the losses compared with an eager training run."""
    plain = Slice("32K eager", "32K", {}, steps=5)
    with sheet.attempt(COMPILED.name):
        found = measure(job, sheet, COMPILED)
        sheet.add(f"{COMPILED.name}, first step", found[0]["step_seconds"], unit="s")
        # The step slices has run it, if it ran.
        folder = folder_of(job, LENGTHS[0])
        beside = steps_of(folder) or measure(job, sheet, plain)
        losses = [[step["loss"] for step in steps] for steps in (found, beside)]
        error = max(abs(a / b - 1) for a, b in zip(*losses, strict=False))
        # Five bfloat16 steps that round in another order.
        sheet.add("compiled beside eager, loss", error, bound=1e-2)


def store(job: Job, sheet: Sheet) -> None:
    """Measure layers by chunks, with kept activations on the device and on the host."""
    rates = {}
    for one in STORE:
        with sheet.attempt(one.name):
            rates[one.name] = rate_of(measure(job, sheet, one))
    if {"128K device", "128K host"} <= rates.keys():
        sheet.add("128K host / device", rates["128K host"] / rates["128K device"], unit="of the rate")


def profile(job: Job, sheet: Sheet) -> None:
    """Profile one step: the fraction of time in which the GPU is busy, and the number of host waits."""
    path = job.scratch / "profile.json.gz"
    with sheet.attempt("profile"):
        train(job, PROFILED, ["--profile", str(path)])
        sheet.add("trace file", path.stat().st_size / 2**20, unit="MiB", bound=14.0)
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        if not kernels:
            sheet.add("busy", skipped="no kernel of a GPU is in the trace")
            return
        sheet.add("busy", 100 * busy_share(kernels), unit="% of the time from the first kernel to the last")
        sheet.add("host waits", float(num_waits(events)), unit="of a step")


def long(job: Job, sheet: Sheet) -> None:
    """Run a row of a million tokens through one layer, for one step."""
    with sheet.attempt(LONG.name):
        measure(job, sheet, LONG)


_GROUPS = {"lengths": lengths, "compiled": compiled, "store": store, "profile": profile, "long": long}


def measure(job: Job, sheet: Sheet, one: Slice) -> list[dict[str, Any]]:
    """Train the slice, add its checks, and return the records of its steps."""
    train(job, one, [])
    found = steps_of(folder_of(job, one))
    assert len(found) == one.steps, f"{len(found)} of {one.steps} steps"
    later = found[1:] or found
    sheet.add(f"{one.name}, tokens/s", rate_of(found))
    shares = [step["mfu"] for step in later if step.get("mfu") is not None]
    if shares:
        sheet.add(f"{one.name}, MFU", 100 * statistics.median(shares), unit="%")
    peak = max(step["max_memory_bytes"] for step in found)
    plan = next((record for record in records(folder_of(job, one)) if record.get("event") == "plan"), {})
    beside = []
    if "step_seconds" in plan:
        error = plan["step_seconds"] / statistics.median(step["step_seconds"] for step in later) - 1
        beside.append(f"plan's seconds {error:+.0%}")
    if "peak_bytes" in plan:
        beside.append(f"plan {plan['peak_bytes'] / GIB:.1f} GiB")
    traced = job.figure_of("trace", one.name)
    sheet.add(f"{one.name}, GiB", peak / GIB, unit="GiB", expected=traced, source="plan --trace on this machine",
              at_most=True, note=", ".join(beside))  # fmt: skip
    return found


def train(job: Job, one: Slice, profiler: Sequence[str]) -> None:
    """Run the training script until the slice's steps are done; it writes no checkpoint."""
    own = {"data.train": rows_folder(job, one.length), "run.output_dir": folder_of(job, one)}
    words = [sys.executable, "benchmarks/profiled.py", *profiler, "--profiled-step", str(one.steps + 1)]
    run_command([*words, *flags(settings_of(job, one) | own)], seconds=job.pick(one.seconds, 400))


def folder_of(job: Job, one: Slice) -> Path:
    """Return the run folder of a slice."""
    return job.scratch / "runs" / one.name.replace(" ", "_")


def rate_of(found: Sequence[dict[str, Any]]) -> float:
    """Return the median tokens per second; the first step, which allocates and compiles, counts only if it is alone."""
    return statistics.median(step["tokens_per_second"] for step in (found[1:] or found))


def busy_share(kernels: Iterable[dict[str, Any]]) -> float:
    """Return the fraction of the time between the first and the last kernel in which at least one runs."""
    spans = sorted((event["ts"], event["ts"] + event.get("dur", 0)) for event in kernels)
    busy, reached = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return busy / max(reached - spans[0][0], 1e-9)


def num_waits(events: Iterable[dict[str, Any]]) -> int:
    """Return how often the host waited for the device: synchronizations of stream, device or event."""
    waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
    return sum(event.get("name") in waits for event in events)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the step as a command."""
    return run_step(run, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Seconds per step by ``plan --device measured``, compared with ten real training runs on one, two and four ranks.

    python -m benchmarks.plan_seconds [--cpu-time] [--quick] [--only NAME …]

For each number of ranks the machine is measured by that many processes (``longctx measure --ranks N``) right before its
training runs. A training run is ``pretrain``'s own loop on as many gloo ranks with a thread each: after two steps the
median of five. The plan knows the config, the document lengths and that profile; nothing was fitted to these training
runs, and three of them (``held out``) were first planned after the plan was complete. The slowest rank's step may be 15
% off the plan.

Time is wall time. ``--cpu-time`` counts the busiest rank's CPU seconds instead, multiplied by the ranks per core, in
both profile and training runs: for a machine with other programs. ``--save`` writes
``benchmarks/results/KIND/plan_seconds.json``; exit code 1 if a result is outside its bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.plan_runs import Case, config_of, planned, settings_of, write_shards
from benchmarks.ranks import run_ranks
from launcher.plan.estimate import RunEstimate

BOUND = 0.15
WARM_UP_STEPS, STEPS = 2, 5

CASES = (
    Case("width 256, float32, short rows", 1, 256, 2048, 2048, settings_of("float32", 0), rows=2),
    Case("width 512, bfloat16, one document", 1, 512, 4096, 4096, settings_of("bfloat16", 1, "attention"), layers=2),
    Case("width 768, float32, packed", 1, 768, 2048, 256, settings_of("float32", 2, "inputs"), layers=2, held_out=True),
    Case(
        "width 256, bfloat16, chunks, 32K packed",
        1,
        256,
        32768,
        1024,
        settings_of("bfloat16", 1, "attention", train__chunk_tokens=4096),
        layers=2,
        vocabulary=2048,
    ),
    Case("experts, width 512, bfloat16, packed", 1, 512, 2048, 512, settings_of("bfloat16", 2), experts=True, rows=2),
    Case(
        "experts, width 256, bfloat16, ring of 2",
        2,
        256,
        8192,
        8192,
        settings_of("bfloat16", 1, parallel__context=2),
        layers=2,
        experts=True,
    ),
    Case(
        "width 512, float32, ulysses 2",
        2,
        512,
        4096,
        4096,
        settings_of("float32", 2, parallel__context=2, parallel__ulysses=2),
        layers=3,
    ),
    Case(
        "experts on 2 ranks, width 384, float32",
        2,
        384,
        2048,
        2048,
        settings_of("float32", 1, "attention", parallel__expert=2),
        experts=True,
        rows=2,
        held_out=True,
    ),
    Case(
        "width 384, bfloat16, ring of 4, packed",
        4,
        384,
        16384,
        2048,
        settings_of("bfloat16", 3, "attention", parallel__context=4),
        layers=3,
        held_out=True,
    ),
    Case(
        "width 256, float32, ring 2 × ulysses 2",
        4,
        256,
        8192,
        8192,
        settings_of("float32", 3, "inputs", parallel__context=4, parallel__ulysses=2),
        layers=3,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Seconds of a rank's steps."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def take_steps(case: Case, data: str, output: str, steps: int) -> Steps:
    """Take the training run's steps on this rank, after a few to warm up."""
    import torch

    from launcher.training.setup import build_run
    from launcher.training.trainer import Trainer

    config = config_of(case, data, output)
    run = build_run(config, torch.device("cpu"))
    trainer, found = Trainer(run), Steps()
    for _ in range(WARM_UP_STEPS):
        trainer.take_step()
    for _ in range(steps):
        wall, cpu = time.perf_counter(), time.process_time()
        trainer.take_step()
        found.wall.append(time.perf_counter() - wall)
        found.cpu.append(time.process_time() - cpu)
    run.prefetcher.close()
    return found


def measured_seconds(of_ranks: Sequence[Steps], *, cpu_time: bool) -> float:
    """Return the slowest rank's step, the median of several."""
    if not cpu_time:
        return max(statistics.median(steps.wall) for steps in of_ranks)
    share = max(1.0, len(of_ranks) / len(os.sched_getaffinity(0)))
    return share * max(statistics.median(steps.cpu) for steps in of_ranks)


def measure(cases: Sequence[Case], *, cpu_time: bool, steps: int) -> Iterator[dict[str, Any]]:
    """Yield a row per case; measures the profile first, for each number of ranks."""
    from launcher.measure.run_benchmarks import BenchmarkOptions, benchmark_machine

    with tempfile.TemporaryDirectory() as place:
        folder, hardware = Path(place), None
        for ranks in sorted({case.ranks for case in cases}):
            options = BenchmarkOptions(ranks=ranks, device="cpu", cpu_time=cpu_time)
            begun = time.perf_counter()
            text, hardware = benchmark_machine(options, folder, lambda _: None)
            (folder / f"profile_{ranks}.toml").write_text(text)
            print(f"{ranks} ranks measured in {time.perf_counter() - begun:.0f} s", flush=True)
            for number, case in enumerate(case for case in cases if case.ranks == ranks):
                data = write_shards(folder, case.document_tokens)
                output = folder / f"run_{ranks}_{number}"
                found = run_ranks(take_steps, ranks, case, str(data), str(output), steps)
                shutil.rmtree(output, ignore_errors=True)
                yield _row(case, planned(case, hardware), found, cpu_time=cpu_time)


def _row(case: Case, run: RunEstimate, found: Sequence[Steps], *, cpu_time: bool) -> dict[str, Any]:
    of_plan, of_run = run.seconds.total, measured_seconds(found, cpu_time=cpu_time)
    return {
        "name": case.name,
        "ranks": case.ranks,
        "held_out": case.held_out,
        "planned_seconds": of_plan,
        "measured_seconds": of_run,
        "error": of_plan / of_run - 1,
        "parts": dataclasses.asdict(run.seconds),
        "steps": [dataclasses.asdict(steps) for steps in found],
    }


def main() -> int:
    """Measure, train, compare and save; return 1 if a result is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds in place of time that passes")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="runs whose names begin so; nothing is saved")
    options = parse(parser, "three steps of a run in place of five")
    cases = [case for case in CASES if options.only is None or case.name.startswith(tuple(options.only))]
    rows, bounds = [], []
    for row in measure(cases, cpu_time=options.cpu_time, steps=3 if options.quick else STEPS):
        rows.append(row)
        print(
            f"{row['name']:<44} planned {row['planned_seconds']:7.3f} s  measured {row['measured_seconds']:7.3f} s  "
            f"{row['error']:+.1%}",
            flush=True,
        )
        bounds.append(Bound("error of the plan", abs(row["error"]), BOUND, case=row["name"]))
    content = {"cpu_time": options.cpu_time, "rows": rows}
    return conclude("plan_seconds", content, bounds, options, whole=options.only is None)


if __name__ == "__main__":
    sys.exit(main())

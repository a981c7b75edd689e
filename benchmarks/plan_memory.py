"""``plan``'s bytes per rank compared with the resident memory of eleven real training runs on one, two and four ranks.

    python -m benchmarks.plan_memory [--quick] [--only NAME …]

A training run is ``deepspeed --num_gpus N launcher/pretrain.py`` for three steps; its result is rank 0's largest
resident set, as counted by the kernel from the program's start (``max_memory_bytes`` in metrics.jsonl). The plan is
made before it from its config, the document lengths and one measured value, ``process_bytes``: the memory of a rank's
program with a negligible model, measured on as many ranks. It may be 10 % off in either direction.

``MALLOC_MMAP_THRESHOLD_=4194304`` is in every training run's environment: without it glibc retains an unpredictable
number of freed tensors below 32 MiB. ``--save`` writes ``benchmarks/results/KIND/plan_memory.json``; exit code 1 if a
result in it is outside its bound. Rows from ``--only`` are merged into the earlier ones, with their date.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.machine import RESULTS, machine, processor_kind
from benchmarks.plan_runs import Case, planned, settings_of, write_shards
from launcher.measure.run_benchmarks import BenchmarkOptions, benchmark_machine
from launcher.plan.hardware import Hardware, load_hardware

BOUND = 0.10
STEPS = 3
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "MALLOC_MMAP_THRESHOLD_": "4194304"}
_ROOT = Path(__file__).resolve().parents[1]
_RUN_SECONDS = 1800

CASES = (
    Case("float32, whole layers, all kept", 1, 512, 8192, 8192, settings_of("float32", 0)),
    Case("bfloat16, attention kept", 1, 768, 8192, 8192, settings_of("bfloat16", 1, "attention")),
    Case(
        "float32, chunks, packed",
        1,
        512,
        16384,
        2048,
        settings_of("float32", 1, "attention", train__chunk_tokens=2048),
    ),
    Case(
        "bfloat16, chunks, 4 groups, store host",
        1,
        512,
        16384,
        4096,
        settings_of("bfloat16", 2, "attention", train__chunk_tokens=2048, train__head_groups=4, train__store="host"),
    ),
    Case("experts, bfloat16, packed", 1, 512, 4096, 512, settings_of("bfloat16", 2), experts=True, rows=2),
    Case("a large vocabulary", 1, 256, 4096, 4096, settings_of("float32", 2, "inputs"), layers=2, vocabulary=65536),
    Case("ring of 2, bfloat16", 2, 512, 16384, 16384, settings_of("bfloat16", 1, "attention", parallel__context=2)),
    Case(
        "ulysses 2, float32, inputs kept",
        2,
        512,
        16384,
        8192,
        settings_of("float32", 2, "inputs", parallel__context=2, parallel__ulysses=2),
    ),
    Case(
        "experts on 2 ranks, float32",
        2,
        512,
        4096,
        1024,
        settings_of("float32", 1, parallel__expert=2),
        experts=True,
        rows=2,
    ),
    Case(
        "saves on 2 ranks, float32",
        2,
        768,
        4096,
        4096,
        settings_of("float32", 1, parallel__context=2, checkpoint__every_steps=1, checkpoint__keep_last=1),
    ),
    Case(
        "ring of 4, bfloat16, ZeRO 3",
        4,
        768,
        16384,
        4096,
        settings_of("bfloat16", 3, parallel__context=4),
        layers=6,
    ),
)


def measured_process(ranks: int, folder: Path) -> Hardware:
    """Return the shipped CPU profile with this machine's ``process_bytes``, measured on this many ranks."""
    options = BenchmarkOptions(ranks=ranks, device="cpu", sizes="smallest")
    _, measured = benchmark_machine(options, folder, lambda _: None)
    return dataclasses.replace(load_hardware("cpu"), process_bytes=measured.process_bytes)


def take_run(case: Case, data: Path, output: Path, steps: int) -> int:
    """Return the largest resident set of a training run's rank 0, in bytes. RuntimeError with its output on failure."""
    keys = case.keys | {"data.train": data, "run.output_dir": output, "train.steps": steps}
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    deepspeed = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", f"{case.ranks}"]
    command = [*deepspeed, "--master_port", f"{port}", "launcher/pretrain.py", *words]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(_ROOT)}
    ended = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=_RUN_SECONDS)
    if ended.returncode:
        raise RuntimeError(f"{case.name}: exit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return max(record["max_memory_bytes"] for record in records if record["kind"] == "train")


def measure(cases: Sequence[Case], steps: int) -> Iterator[dict[str, Any]]:
    """Yield a row per case; measures ``process_bytes`` first, for each number of ranks."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for ranks in sorted({case.ranks for case in cases}):
            hardware = measured_process(ranks, folder)
            for number, case in enumerate(case for case in cases if case.ranks == ranks):
                plan = planned(case, hardware)
                largest = max((rank.bytes for rank in plan.ranks), key=lambda b: b.peak)
                data = write_shards(folder, case.document_tokens)
                found = take_run(case, data, folder / f"run_{ranks}_{number}", steps)
                # The checkpoint's copy exists from the first step on.
                needed = largest.peak + plan.copy_bytes
                yield {
                    "name": case.name,
                    "ranks": ranks,
                    "planned_bytes": needed,
                    "copy_bytes": plan.copy_bytes,
                    "measured_bytes": found,
                    "error": needed / found - 1,
                    "parts": dataclasses.asdict(largest),
                }


def merged(before: dict[str, Any], rows: Sequence[dict[str, Any]], now: dict[str, Any]) -> dict[str, Any]:
    """Return the result ``before`` with these rows merged in the order of ``CASES``, each with its date.

    ``now`` is the machine that measured them. ValueError if another processor measured the others.
    """
    if before["machine"]["processor"] != now["processor"]:
        raise ValueError(
            f"the other rows are those of {before['machine']['processor']}, this is {now['processor']}. "
            "Measure all of them, or leave --save out."
        )
    found = {row["name"]: row for row in before["rows"]} | {row["name"]: {**row, "date": now["date"]} for row in rows}
    return {**before, "rows": [found[case.name] for case in CASES if case.name in found]}


def bounds_of(rows: Sequence[dict[str, Any]]) -> list[Bound]:
    """Return each row's bound."""
    return [Bound("error of the plan", abs(row["error"]), BOUND, case=row["name"]) for row in rows]


def main() -> int:
    """Measure, train and compare; return 1 if a result is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="runs whose names begin so; other rows stay")
    options = parse(parser, "two steps of a run in place of three")
    cases = [case for case in CASES if options.only is None or case.name.startswith(tuple(options.only))]
    rows = []
    for row in measure(cases, 2 if options.quick else STEPS):
        rows.append(row)
        planned_mib, measured_mib = row["planned_bytes"] / 2**20, row["measured_bytes"] / 2**20
        print(
            f"{row['name']:<44} planned {planned_mib:6,.0f} MiB  measured {measured_mib:6,.0f} MiB  "
            f"{row['error']:+.1%}",
            flush=True,
        )
    content = {"steps": STEPS, "environment": ENVIRONMENT, "rows": rows}
    path = RESULTS / processor_kind() / "plan_memory.json"
    # Without the other rows these are no result, and quick rows are never saved.
    can_merge = options.only is not None and path.exists() and options.save and not options.quick
    if can_merge:
        content = merged(json.loads(path.read_text()), rows, machine())
    bounds = bounds_of(content["rows"])
    return conclude("plan_memory", content, bounds, options, whole=options.only is None or can_merge)


if __name__ == "__main__":
    sys.exit(main())

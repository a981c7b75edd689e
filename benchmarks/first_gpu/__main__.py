"""Check and measure longctx on one GPU, or keep an archive's results.

    benchmarks/first_gpu.sh 1|2                      one part's steps; STEPS, OUT, DRY as in its comment
    python -m benchmarks.first_gpu --keep FILE …     archives → benchmarks/results, the docs' table, h100.toml
    python -m benchmarks.first_gpu --list            the steps, their limits and expected results

Exit code 1 if a step is FAIL.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.first_gpu.keep import keep
from benchmarks.first_gpu.report import FAIL, table
from benchmarks.first_gpu.runner import Run
from benchmarks.first_gpu.steps import PART_SECONDS, PARTS, Step, named
from benchmarks.machine import machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the programme's two parts, keep archives, or list the steps."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=tuple(PARTS), help="which half of the programme")
    parser.add_argument("--keep", nargs="+", type=Path, metavar="FILE", help="archives to keep, the latest last")
    parser.add_argument("--list", action="store_true", help="print the steps and run nothing")
    wanted = parser.parse_args(arguments)
    if wanted.keep:
        for text in keep(wanted.keep):
            print(text)
        return 0
    if wanted.list:
        list_steps()
        return 0
    if wanted.part is None:
        parser.error("name a part, 1 or 2, or use --keep or --list")
    return run_part(wanted.part, parser)


def list_steps() -> None:
    """Print each step with its limit and its expected results."""
    for part, steps in PARTS.items():
        print(f"part {part}, at most {PART_SECONDS[part]:.0f} s")
        for step in steps:
            how = "alone" if step.alone else f"{step.cores} cores"
            print(f"  {step.name:<10} {step.seconds:>4.0f} s  {how}")
            for name, expected in step.expected.items():
                print(f"      {name}: {expected.figure:g} ({expected.source})")


def run_part(part: str, parser: argparse.ArgumentParser) -> int:
    """Run the part's steps, or those that STEPS names."""
    dry = os.environ.get("DRY", "") not in ("", "0")
    card = card_name()
    if not card and not dry:
        print("No CUDA device: nothing to measure. (DRY=1 runs everything at small sizes on a CPU.)", file=sys.stderr)
        return 1
    try:
        steps: Sequence[Step] = named(os.environ["STEPS"].split()) if os.environ.get("STEPS") else PARTS[part]
    except KeyError as unknown:
        parser.error(f"STEPS names {unknown}; there are {', '.join(s.name for each in PARTS.values() for s in each)}")
    out = Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="first_gpu_")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="first_gpu_", ignore_cleanup_errors=True) as scratch:
        run = Run(
            steps,
            device="cpu" if dry else "cuda",
            scratch=Path(scratch),
            out=out / "r.tgz",
            seconds=float(os.environ.get("SECONDS_IN_ALL") or (36_000 if dry else PART_SECONDS[part])),
            cores=os.cpu_count() or 1,
            facts={"machine": machine(), "card": card, "part": part},
        )
        outcomes = run.all_steps()
    print(table(outcomes))
    print(f"\narchive: {out / 'r.tgz'}", flush=True)
    return int(any(outcome.verdict == FAIL for outcome in outcomes))


def card_name() -> str:
    """Return the first GPU's name from its driver, or from PyTorch; empty without a GPU."""
    driver = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    # In a separate process: this one must use no GPU memory.
    torch = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    for command in (driver, torch):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return done.stdout.partition("\n")[0].strip()
    return ""


if __name__ == "__main__":
    sys.exit(main())

"""Run all benchmarks one after the other, and print one summary of their bounds.

    python -m benchmarks [NAME …] [--quick]

Each runs in its own process, and a failure stops no other. A missed limit on time, or on a peer's memory, is measured
again in a second process: it counts as missed if both miss it, and the summary shows both results. The summary lists
every missed bound; of the held bounds with the same name it lists the closest. Exit code 1 if any is missed. Below the
summary are the benchmarks left out: those with bounds that run only by name (``SEPARATE``), with their last results on
this kind of processor, scripts without bounds (``SCRIPTS``), and benchmarks that need a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bounds import Bound
from benchmarks.first_gpu.figures import last_on_gpu
from benchmarks.machine import RESULTS, offer_save, processor_kind

NAMES = (
    "attention",
    "gated_delta",
    "peers",
    "loss",
    "decoder",
    "encoders",
    "compiled",
    "chunks",
    "moe",
    "generation",
    "generation_batch",
    "long_prompt",
    "start",
    "start_memory",
    "data_plan",
    "saving",
    "delivery",
    "build",
    "quantized",
    "audit",
    "silent_errors",
)
SEPARATE = {
    "endurance": "one run of 50,000 steps, forty minutes; fewer do not tell growth from caches that fill",
    "plan_memory": "eleven training runs by the launcher, up to four ranks, some twenty minutes",
    "hybrids": "learning of a hybrid beside full attention, recall and long rows; an hour",
    "young_experts": "the quickstart's experts on five corpora, by part of the recipe; half an hour",
    "translation": "learning beside transformers, three seeds; needs LibreOffice's help pages; an hour",
    "pretraining": "learning of encoders beside transformers; needs LibreOffice's help pages; an hour",
    "images": "learning of image models beside transformers, three seeds; needs Fashion-MNIST's files; two hours",
    "preferences": "preference losses beside TRL's trainers; needs TRL; ten minutes",
    "tuning": "needs TRL in an environment of its own ($LONGCTX_TRL_PYTHON); ten minutes",
    "plan_seconds": "ten training runs beside their plans, up to half an hour; needs a machine without other programs",
}
"""Benchmarks with bounds that run only by name, and the reason."""
SCRIPTS = {
    "faults": "the fault suite as a table, some forty minutes; `make faults` has its tests and their verdict",
    "plan_bytes": "needs PyTorch's CUDA build; up to ten minutes for each of twelve traces",
    "image_plan": "needs PyTorch's CUDA build; a minute or two for each of eight traces",
    "scale": "costs that grow up to 4,096 ranks; a page of results and exponents, for readers",
    "degrees": "rows side by side, on a corpus that is named; it ends with 1 where work is uneven",
    "layouts": "imbalance and rows received, on a corpus that is named",
    "profiled": "is started by deepspeed or torchrun",
}
"""Commands in this folder that report no bounds, and the reason."""
GPU = ("first_gpu", "gpu_attention", "gpu_moe")
"""Benchmarks that need a GPU: the summary shows their last results on one, or that they wait for one."""
TIMEOUT_SECONDS = 7200


@dataclass(frozen=True)
class Outcome:
    """Result of one benchmark."""

    name: str
    bounds: list[Bound]
    seconds: float
    problem: str = ""
    """Reason why it failed, other than a missed bound; empty if it ended normally."""

    @property
    def passed(self) -> bool:
        """True if it ran to its end and every bound holds."""
        return not self.problem and all(bound.held for bound in self.bounds)


class Row(NamedTuple):
    """One line of the summary."""

    benchmark: str
    bound: str
    figure: str
    verdict: str
    seconds: str


def run_benchmark(name: str, *, quick: bool = False, keep: bool = False, timeout: float = TIMEOUT_SECONDS) -> Outcome:
    """Run ``benchmarks.NAME`` with our output streams, and read its bounds."""
    print(f"\n==> {name}", flush=True)
    begun = time.monotonic()
    arguments = ["--quick"] if quick else []
    bounds, problem = measure(name, [*arguments, *["--save"] * keep], timeout)
    if any(not bound.held for bound in bounds):
        problem = ""  # the exit code repeats the bounds' verdict
    elif not bounds and not problem:
        problem = "it stated no bound"
    bounds = measure_again(name, arguments, bounds, timeout)
    return Outcome(name, bounds, time.monotonic() - begun, problem)


def measure(name: str, arguments: Sequence[str], timeout: float) -> tuple[list[Bound], str]:
    """Return the bounds that a benchmark records, and the reason if it failed ("" otherwise)."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "bounds.json"
        problem = run_command(
            [sys.executable, "-m", f"benchmarks.{name}", "--record", str(record), *arguments], timeout
        )
        if not record.exists():
            return [], problem
        return [_bound(kept) for kept in json.loads(record.read_text())], problem


def measure_again(name: str, arguments: Sequence[str], bounds: Sequence[Bound], timeout: float) -> list[Bound]:
    """Return the bounds; measure missed ones that allow it again in a second process."""
    asked = dict.fromkeys(bound.again for bound in bounds if not bound.held and bound.again is not None)
    second: dict[str, float] = {}
    for again in asked:
        print(f"\n==> {name} again, for a missed limit", flush=True)
        found, _ = measure(name, [*arguments, *again], timeout)
        second |= {bound.text: bound.figure for bound in found}
    measured = []
    for bound in bounds:
        if not bound.held and bound.again is not None:
            bound = replace(bound, second=second.get(bound.text))
        measured.append(bound)
    return measured


def run_command(command: Sequence[str], timeout: float) -> str:
    """Return the reason why a command failed, "" if it succeeded; kill it and its workers after ``timeout`` seconds."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        return f"it took more than {timeout:g} seconds"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return "" if code == 0 else f"exit code {code}"


def _bound(kept: dict[str, Any]) -> Bound:
    values = {name: value for name, value in kept.items() if name != "held"}
    if values["again"] is not None:
        values["again"] = tuple(values["again"])
    return Bound(**values)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the table, followed by the reasons for the missed limits."""
    table = [Row("benchmark", "bound", "result", "", "seconds")]
    for outcome in outcomes:
        table += _rows(outcome)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    missed = [bound for outcome in outcomes for bound in outcome.bounds if not bound.held and bound.why]
    return "\n".join(lines + [f"{bound}: {bound.why}" for bound in missed])


def _rows(outcome: Outcome) -> Iterator[Row]:
    """Yield a benchmark's rows; only the first has its name and seconds."""
    name, seconds = outcome.name, f"{outcome.seconds:.0f}"
    if outcome.problem:
        yield Row(name, "runs to its end", outcome.problem, "FAILED", seconds)
        name = seconds = ""
    for what in dict.fromkeys(bound.what for bound in outcome.bounds):
        alike = [bound for bound in outcome.bounds if bound.what == what]
        for bound in alike:
            if not bound.held:
                yield Row(name, bound.text, bound.figures, "FAILED", seconds)
                name = seconds = ""
        held = [bound for bound in alike if bound.held]
        if held:
            closest = max(held, key=lambda bound: bound.margin)
            note = f" (closest of {len(held)})" if len(held) > 1 else ""
            yield Row(name, closest.text + note, closest.figures, "held", seconds)
            name = seconds = ""


def left_out() -> str:
    """Return the benchmarks left out by default, with their last results."""
    width = max(map(len, [*SEPARATE, *SCRIPTS, *GPU]))
    lines = ["not in this run, each by `python -m benchmarks.NAME`:"]
    for name, reason in SEPARATE.items():
        lines.append(f"  {name:<{width}}  {reason}; {last_measured(name)}")
    lines += [f"  {name:<{width}}  {reason}" for name, reason in SCRIPTS.items()]
    lines += ["on a GPU (`benchmarks/first_gpu.sh 1`, then 2, or `python -m benchmarks.NAME`):"]
    lines += [f"  {name:<{width}}  {last_on_gpu(RESULTS, name)}" for name in GPU]
    return "\n".join(lines)


def last_measured(name: str) -> str:
    """Return the date of a benchmark's result on this kind of processor, and whether its bounds held."""
    path = RESULTS / processor_kind() / f"{name}.json"
    if not path.exists():
        return "never measured on this kind of processor"
    result = json.loads(path.read_text())
    missed = sum(not kept["held"] for kept in result["bounds"])
    verdict = f"{missed} bounds missed" if missed else "every bound held"
    return f"{result['machine']['date']}: {verdict}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks and print the summary; return 1 if a bound is missed or a benchmark failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = (*NAMES, *SEPARATE)
    shown = f"which to run (default: all of {', '.join(NAMES)}); {', '.join(SEPARATE)} run when they are named"
    parser.add_argument("names", nargs="*", metavar="NAME", help=shown)
    parser.add_argument("--quick", action="store_true", help="less of each; nothing is saved")
    offer_save(parser)
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}. Try one of {', '.join(known)}.")
    outcomes = [run_benchmark(name, quick=options.quick, keep=options.save) for name in options.names or NAMES]
    failed = [outcome.name for outcome in outcomes if not outcome.passed]
    print(f"\n{summary(outcomes)}\n")
    if not options.names:
        print(f"{left_out()}\n")
    print(f"outside their bounds: {', '.join(failed)}" if failed else "every bound holds")
    return int(bool(failed))


if __name__ == "__main__":
    # As for Ctrl-C: the running benchmark ends too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())

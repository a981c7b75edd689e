"""Every benchmark, one after the other, and one summary of their bounds at the end.

    python -m benchmarks [NAME …] [--quick]

Each runs in a process of its own, and what becomes of one stops no other. A missed limit on time, or on a peer's
memory, is measured again in a second process: it counts as missed when both miss it, and the summary has both figures.
The summary has every bound that is missed; of those that a benchmark holds in several cases it has the closest. Exit
code 1 if any is missed. Below it stands what the run left out: benchmarks that run when they are named (``SEPARATE``),
with what was last measured on this kind of processor, scripts that state no bounds (``SCRIPTS``), and what needs a GPU.
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
    "plan_memory": "eleven runs by the launcher, up to four ranks, some twenty minutes",
    "hybrids": "learning of a hybrid beside full attention, recall and long rows; an hour",
    "young_experts": "the quickstart's experts on five corpora, by part; half an hour",
    "translation": "learning beside transformers, three seeds; needs LibreOffice's help pages; an hour",
    "pretraining": "learning of encoders beside transformers; needs LibreOffice's help pages; an hour",
    "tuning": "needs TRL in an environment of its own ($LONGCTX_TRL_PYTHON); ten minutes",
    "plan_seconds": "ten runs beside their plans, up to half an hour; needs a machine without other programs",
}
"""Benchmarks with bounds that run when they are named, and why they are no part of the run without names."""
SCRIPTS = {
    "faults": "the fault suite as a table, some forty minutes; `make faults` has its tests and their verdict",
    "plan_bytes": "needs PyTorch's CUDA build; up to ten minutes for each of twelve traces",
    "scale": "what grows with 4,096 ranks; a page of figures and powers, read by people",
    "degrees": "rows side by side, on a corpus that is named; it ends with 1 where work is uneven",
    "layouts": "imbalance and rows received, on a corpus that is named",
    "profiled": "is started by deepspeed or torchrun",
}
"""Commands of this folder that state no bounds to this one, and why."""
GPU = ("first_gpu", "gpu_attention", "gpu_moe")
"""Those that need a GPU: what was measured on one stands in the table, or that it waits for one."""
TIMEOUT_SECONDS = 7200


@dataclass(frozen=True)
class Outcome:
    """What became of one benchmark."""

    name: str
    bounds: list[Bound]
    seconds: float
    problem: str = ""
    """How it ended, if neither well nor with a missed bound."""

    @property
    def passed(self) -> bool:
        """Whether it ran to its end and every bound holds."""
        return not self.problem and all(bound.held for bound in self.bounds)


class Row(NamedTuple):
    """One line of the summary."""

    benchmark: str
    bound: str
    figure: str
    verdict: str
    seconds: str


def run_benchmark(name: str, *, quick: bool = False, keep: bool = False, timeout: float = TIMEOUT_SECONDS) -> Outcome:
    """Run ``benchmarks.NAME``, whose output goes where ours goes, and read its bounds."""
    print(f"\n==> {name}", flush=True)
    begun = time.monotonic()
    arguments = ["--quick"] if quick else []
    bounds, problem = measure(name, [*arguments, *["--save"] * keep], timeout)
    if any(not bound.held for bound in bounds):
        problem = ""  # the exit code says what the bounds say
    elif not bounds and not problem:
        problem = "it stated no bound"
    bounds = measure_again(name, arguments, bounds, timeout)
    return Outcome(name, bounds, time.monotonic() - begun, problem)


def measure(name: str, arguments: Sequence[str], timeout: float) -> tuple[list[Bound], str]:
    """The bounds that a benchmark states, and how it ended: "" if well."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "bounds.json"
        problem = run_command(
            [sys.executable, "-m", f"benchmarks.{name}", "--record", str(record), *arguments], timeout
        )
        if not record.exists():
            return [], problem
        return [_bound(kept) for kept in json.loads(record.read_text())], problem


def measure_again(name: str, arguments: Sequence[str], bounds: Sequence[Bound], timeout: float) -> list[Bound]:
    """The bounds, of which missed ones that a second process may measure have its figure too."""
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
    """How a command ended, "" if well. After ``timeout`` seconds it is killed, and its workers with it."""
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
    """The table, and below it where the missed limits come from."""
    table = [Row("benchmark", "bound", "figure", "", "seconds")]
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
    """A benchmark's lines; its name and seconds stand in the first."""
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
    """What a run without names does not measure, and what its last measurement said."""
    width = max(map(len, [*SEPARATE, *SCRIPTS, *GPU]))
    lines = ["not in this run, each by `python -m benchmarks.NAME`:"]
    for name, reason in SEPARATE.items():
        lines.append(f"  {name:<{width}}  {reason}; {last_measured(name)}")
    lines += [f"  {name:<{width}}  {reason}" for name, reason in SCRIPTS.items()]
    lines += ["on a GPU (`benchmarks/first_gpu.sh 1`, then 2, or `python -m benchmarks.NAME`):"]
    lines += [f"  {name:<{width}}  {last_on_gpu(RESULTS, name)}" for name in GPU]
    return "\n".join(lines)


def last_measured(name: str) -> str:
    """The day of a benchmark's result on this kind of processor, and whether its bounds held."""
    path = RESULTS / processor_kind() / f"{name}.json"
    if not path.exists():
        return "never measured on this kind of processor"
    result = json.loads(path.read_text())
    missed = sum(not kept["held"] for kept in result["bounds"])
    verdict = f"{missed} bounds missed" if missed else "every bound held"
    return f"{result['machine']['date']}: {verdict}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them and print the summary; 1 when a bound is missed or a benchmark did not run to its end."""
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
    # As Ctrl-C does: the benchmark that runs ends too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())

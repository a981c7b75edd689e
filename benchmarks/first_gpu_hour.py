"""The first hour on a machine with GPUs, in one report; ``benchmarks/first_gpu_hour.sh`` starts it.

    python -m benchmarks.first_gpu_hour [--output FOLDER] [--only STAGE …] [--minutes N] [--dry-run]

Each stage is a process of its own with a time limit of its own: what becomes of one stops no other. The folder gets a
log for each stage, ``report.md`` for people and ``report.json`` for machines. Exit code 1 if a stage failed.
``--dry-run`` runs what can run on a CPU, at tiny sizes, and skips the rest: a check of the script, no measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_hour_stages import ROOT, Place, Stage, stages
from benchmarks.machine import RESULTS, machine

PASSED, FAILED, TOO_LONG, SKIPPED = "passed", "failed", "took too long", "skipped"


@dataclass(frozen=True)
class Outcome:
    """What became of a stage."""

    name: str
    question: str
    verdict: str
    seconds: float = 0.0
    why: str = ""
    """Of a stage that did not pass: the reason, or the end of its log."""
    figures: dict[str, Any] = field(default_factory=dict)
    command: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages and write the report; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="benchmarks/first_gpu_hour.sh", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder of the report (default: named by machine and date)")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="these stages, by name")
    parser.add_argument("--minutes", type=float, help="limit of each stage, instead of its own")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, at tiny sizes: checks the script")
    wanted = parser.parse_args(arguments)
    gpus = torch.cuda.device_count()
    if not gpus and not wanted.dry_run:
        print("No CUDA device: nothing to measure. (--dry-run checks the script on a CPU.)", file=sys.stderr)
        return 1
    if wanted.dry_run:
        gpus = 0
    folder = (wanted.output or default_folder()).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    known = stages(Place(folder, gpus))
    names = [stage.name for stage in known]
    unknown = set(wanted.only or ()) - set(names)
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = [stage for stage in known if not wanted.only or stage.name in wanted.only]
    outcomes = run_stages(chosen, folder, limit_minutes=wanted.minutes, dry=wanted.dry_run)
    print(f"\nreport: {folder / 'report.md'}")
    return int(any(outcome.verdict in (FAILED, TOO_LONG) for outcome in outcomes))


def default_folder() -> Path:
    """Named by machine and date."""
    name = "cpu_dry_run"
    if torch.cuda.is_available():
        name = f"{torch.cuda.device_count()}x_{torch.cuda.get_device_name()}"
    words = re.sub(r"\W+", "_", name).strip("_").lower()
    return RESULTS / "first_gpu_hour" / f"{words}_{time.strftime('%Y-%m-%d_%H%M', time.gmtime())}"


def run_stages(
    chosen: Sequence[Stage], folder: Path, *, limit_minutes: float | None = None, dry: bool = False
) -> list[Outcome]:
    """Run the stages one after the other; the report is written anew after each, so that a crash leaves one."""
    outcomes: list[Outcome] = []
    for stage in chosen:
        print(f"\n== {stage.name}: {stage.question}", flush=True)
        outcome = run_stage(stage, folder, limit_minutes)
        outcomes.append(outcome)
        print(f"   {outcome.verdict} in {outcome.seconds:.0f} s {outcome.why.splitlines()[-1] if outcome.why else ''}")
        for name, value in outcome.figures.items():
            print(f"   {name}: {value}")
        write_report(outcomes, folder, dry=dry)
    return outcomes


def run_stage(stage: Stage, folder: Path, limit_minutes: float | None = None) -> Outcome:
    """Run one stage, whatever it does."""
    if stage.skipped:
        return Outcome(stage.name, stage.question, SKIPPED, why=stage.skipped)
    log, limit, started = folder / f"{stage.name}.log", 60 * (limit_minutes or stage.minutes), time.monotonic()
    verdict, why = PASSED, ""
    for command in stage.commands:
        left = limit - (time.monotonic() - started)
        code = run_logged(command, log, seconds=left)
        if code is None:
            verdict, why = TOO_LONG, f"ended after {limit / 60:g} minutes; see {log.name}"
            break
        if code not in stage.fine:
            verdict, why = FAILED, f"exit code {code}:\n{last_lines(log)}"
            break
    # Figures of a stage that failed half-way are worth having too.
    figures: dict[str, Any] = {}
    try:
        figures = stage.figures()
    except Exception as error:
        if verdict == PASSED:
            verdict, why = FAILED, f"its figures cannot be read: {type(error).__name__}: {error}"
    seconds = round(time.monotonic() - started, 1)
    shown = " && ".join(shlex.join(command) for command in stage.commands)
    return Outcome(stage.name, stage.question, verdict, seconds, why, figures, shown)


def run_logged(command: Sequence[str], log: Path, *, seconds: float) -> int | None:
    """The exit code of a command whose output is added to a log; None when it took too long."""
    with log.open("a") as out:
        out.write(f"$ {shlex.join(command)}\n")
        out.flush()
        # A session of its own: the ranks that a launcher has started end with it.
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            return process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_session(process)


def _end_session(process: subprocess.Popen) -> None:
    """End whatever a command has left running."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def last_lines(log: Path, count: int = 15) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


def write_report(outcomes: Sequence[Outcome], folder: Path, *, dry: bool) -> None:
    """Write ``report.md`` and ``report.json``."""
    told = {"machine": machine(), "gpus": gpu_names(), "dry_run": dry, "stages": [asdict(x) for x in outcomes]}
    (folder / "report.json").write_text(json.dumps(told, indent=1) + "\n")
    (folder / "report.md").write_text(as_markdown(outcomes, told))


def gpu_names() -> list[str]:
    """The name of each GPU."""
    return [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]


def as_markdown(outcomes: Sequence[Outcome], told: dict[str, Any]) -> str:
    """The report for people: a table of verdicts, then each stage with its figures."""
    where = told["machine"]
    lines = ["# First hour on GPUs", ""]
    if told["dry_run"]:
        lines += ["A dry run at tiny sizes on a CPU: it checks the script and measures nothing.", ""]
    gpus = ", ".join(told["gpus"]) or "no GPU"
    lines += [f"{gpus}; {where['processor']}, {where['cores']} cores; torch {where['torch']}; {where['date']}", ""]
    lines += ["| stage | verdict | seconds | question |", "|---|---|--:|---|"]
    lines += [f"| {x.name} | **{x.verdict}** | {x.seconds:.0f} | {x.question} |" for x in outcomes]
    for x in outcomes:
        lines += ["", f"## {x.name}: {x.verdict}", ""]
        if x.command:
            lines += ["```bash", x.command, "```", ""]
        if x.figures:
            lines += ["| figure | |", "|---|---|", *(f"| {name} | {value} |" for name, value in x.figures.items()), ""]
        if x.why:
            lines += ["```", x.why, "```", ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())

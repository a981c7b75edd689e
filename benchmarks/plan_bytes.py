"""``plan`` compared with ``plan --trace``: bytes by arithmetic and by tracing the code, for fourteen runs of four
models.

    LONGCTX_CUDA_PYTHON=PYTHON python -m benchmarks.plan_bytes [--few] [NAME …]

131,072 tokens per rank, bfloat16, ZeRO 2, all layers of each model; ``--few`` takes three of them (four of the hybrid,
the last of which has softmax attention; five of DeepSeek-V3, whose first three have no experts). PYTHON has PyTorch's
CUDA build; no GPU is needed. A trace of all layers takes one to ten minutes. ZeRO's memory is the same arithmetic in
both, so the bound also applies to activations alone: the peak, and kept with passing, are never more than 1 % below the
trace, nor more than 8 % above it. Each row is saved in ``benchmarks/results/KIND/plan_bytes.json``, with which tests
compare the arithmetic; a row with few layers does not replace one with all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import KINDS, RESULTS, machine, offer_save, processor_kind
from launcher.config.load_config import load_run_config
from launcher.plan.estimate import RunEstimate, estimate_run
from launcher.plan.hardware import load_hardware
from launcher.plan.planned_world import World
from launcher.plan.zero_bytes import StepBytes

LEAST, MOST = -0.01, 0.08
_TOKENS = 131072
_ATTENTION = ("--train.keep", "attention")
_ONE_EXPERT_RANK = ("--parallel.expert", "1")
_EIGHT = ("--parallel.expert", "8")


def _chunks(groups: int, store: str = "host") -> tuple[str, ...]:
    return (*_ATTENTION, "--train.store", store, "--train.chunk_tokens", "4096", "--train.head_groups", str(groups))


@dataclass(frozen=True)
class Case:
    """A training run to plan."""

    name: str
    preset: str
    context: int
    flags: tuple[str, ...]
    few_layers: int = 3

    def argv(self, *, few: bool) -> list[str]:
        """Arguments for ``plan``."""
        tokens = str(_TOKENS * self.context)
        argv = ["--config", "quickstart", "--model.preset", self.preset, "--parallel.context", str(self.context)]
        argv += ["--data.seq_len", tokens, "--train.tokens_per_step", tokens, "--train.micro_batch_rows", "1"]
        if few:
            argv += ["--model.num_layers", str(self.few_layers)]
        return [*argv, *self.flags]


LLAMA, QWEN, DEEPSEEK, HYBRID = "llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "qwen3.5-9b"
CASES = (
    Case("llama, 1 rank, attention", LLAMA, 1, (*_ONE_EXPERT_RANK, *_ATTENTION)),
    Case("llama, 1 rank, all", LLAMA, 1, (*_ONE_EXPERT_RANK,)),
    Case("llama, ring of 8, attention", LLAMA, 8, (*_ONE_EXPERT_RANK, *_ATTENTION)),
    Case("llama, ulysses 4 × ring 2, attention", LLAMA, 8, (*_ONE_EXPERT_RANK, *_ATTENTION, "--parallel.ulysses", "4")),
    Case(
        "llama, ring of 8, inputs, host",
        LLAMA,
        8,
        (*_ONE_EXPERT_RANK, "--train.keep", "inputs", "--train.store", "host"),
    ),
    Case("llama, ring of 8, chunks, device", LLAMA, 8, (*_ONE_EXPERT_RANK, *_chunks(4, "device"))),
    Case("qwen, 1 rank, attention", QWEN, 1, (*_ONE_EXPERT_RANK, *_ATTENTION)),
    Case("qwen, ring of 8, experts on 8, attention", QWEN, 8, (*_EIGHT, *_ATTENTION)),
    Case("qwen, ring of 8, experts on 8, chunks, host", QWEN, 8, (*_EIGHT, *_chunks(4))),
    Case("deepseek, 1 rank, attention", DEEPSEEK, 1, (*_ONE_EXPERT_RANK, *_ATTENTION), 5),
    Case("deepseek, ring of 8, attention", DEEPSEEK, 8, (*_ONE_EXPERT_RANK, *_ATTENTION), 5),
    Case("deepseek, ring of 8, chunks, host", DEEPSEEK, 8, (*_ONE_EXPERT_RANK, *_chunks(8)), 5),
    Case("hybrid, ring of 8, attention", HYBRID, 8, (*_ONE_EXPERT_RANK, *_ATTENTION), 4),
    Case("hybrid, ring of 8, chunks, host", HYBRID, 8, (*_ONE_EXPERT_RANK, *_chunks(16)), 4),
)


def planned(case: Case, *, few: bool) -> RunEstimate:
    """Return the bytes by arithmetic."""
    config = load_run_config(case.argv(few=few))
    return estimate_run(config, World.of(config), load_hardware("h100"))


def errors(run: RunEstimate, traced: dict[str, int]) -> tuple[float, float]:
    """Return signed errors of the peak, and of its activation memory, as fractions of the trace."""
    of_bytes = largest(run)
    activations = (of_bytes.kept + of_bytes.passing) / (traced["kept"] + traced["passing"]) - 1
    return of_bytes.peak / traced["peak"] - 1, activations


def trace(case: Case, *, few: bool) -> dict[str, int]:
    """Return the bytes of the rank that needs most, by ``plan --trace``."""
    python = os.environ.get("LONGCTX_CUDA_PYTHON", sys.executable)
    command = [python, "-m", "launcher", "plan", "--trace", "--json", *case.argv(few=few)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    ranks: list[dict[str, Any]] = [rank["bytes"] for rank in json.loads(done.stdout)["ranks"]]
    most = max(ranks, key=lambda one: one["peak"])
    return {name: most[name] for name in ("kept", "kept_on_host", "passing", "peak")}


def largest(run: RunEstimate) -> StepBytes:
    """Return the bytes of the rank that needs most."""
    return max((rank.bytes for rank in run.ranks), key=lambda one: one.peak)


def load_rows() -> dict[str, dict[str, Any]]:
    """Return earlier traces by name, preferring all layers. Traces do not depend on the machine."""
    found: dict[str, dict[str, Any]] = {}
    for path in filter(Path.exists, map(_path, KINDS)):
        for row in json.loads(path.read_text())["rows"]:
            if not row["few_layers"] or row["name"] not in found:
                found[row["name"]] = row
    return found


def _path(kind: str) -> Path:
    return RESULTS / kind / "plan_bytes.json"


def save(row: dict[str, Any]) -> None:
    """Insert a row into the file, in case order."""
    rows = load_rows()
    if row["few_layers"] and not rows.get(row["name"], row)["few_layers"]:
        return
    rows[row["name"]] = row
    ordered = [rows[case.name] for case in CASES if case.name in rows]
    _path(processor_kind()).write_text(json.dumps({"machine": machine(), "rows": ordered}, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Trace and compare; return 1 if a row is outside its bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="few layers of each model")
    parser.add_argument("names", nargs="*", help="these runs alone")
    offer_save(parser)
    options = parser.parse_args(argv)
    missed = 0
    print("run | kept + passing, GiB | planned | traced peak, GiB | planned | error of peak | of activations")
    for case in CASES:
        if options.names and case.name not in options.names:
            continue
        traced, run = trace(case, few=options.few), planned(case, few=options.few)
        of_peak, of_activations = errors(run, traced)
        missed += not all(LEAST <= error <= MOST for error in (of_peak, of_activations))
        of_bytes = largest(run)
        planned_bytes = {name: getattr(of_bytes, name) for name in traced}
        if options.save:
            save({"name": case.name, "few_layers": options.few, **traced, "planned": planned_bytes})
        figures = (traced["kept"] + traced["passing"], of_bytes.kept + of_bytes.passing, traced["peak"], of_bytes.peak)
        cells = [f"{figure / 2**30:.1f}" for figure in figures]
        print(" | ".join([case.name, *cells, f"{of_peak:+.1%}", f"{of_activations:+.1%}"]), flush=True)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

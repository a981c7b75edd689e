"""``run.audit_every``: detected bit flips, false alarms, and the cost of an audited step.

    python -m benchmarks.audit [--quick]

A small real training run on four ranks with every step audited. First come steps without a fault, to count false
alarms. Then one bit in one matmul result of a random rank is flipped per step: in audited matmuls for every bit
position, then in any matmul for the fraction detected overall. Findings are recorded here and do not end the run. Then
audited steps take turns with plain ones on two ranks, for CPU seconds and memory. ``--save`` writes
``benchmarks/results/KIND/audit.json``; exit code 1 if a result is outside its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.flips import Flip, looked_at
from benchmarks.ranks import run_ranks
from benchmarks.start import make_shards
from benchmarks.start_memory import PeakMemory, load_config

RANKS = 4
PRELOAD = ("launcher.training.setup", "launcher.checkpoint.background_saver", "deepspeed.module_inject")
TINY = {
    "model.vocab_size": 1024,
    "model.hidden_size": 64,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 16,
    "model.ffn_size": 128,
    "parallel.context": 2,
    "train.steps": 100_000,
    "train.lr": 1e-5,
    "train.skip_steps": 1_000_000,
    "run.audit_every": 1,
}
COSTS = {
    "model.vocab_size": 1024,
    "model.hidden_size": 512,
    "model.num_layers": 6,
    "model.num_heads": 8,
    "model.num_kv_heads": 2,
    "model.head_dim": 64,
    "model.ffn_size": 1376,
    "data.seq_len": 1024,
    "train.tokens_per_step": 2048,
    "train.dtype": "float32",
    "train.steps": 100_000,
}
"""17 million parameters, 1,024 tokens per rank and step: small, so that an audit weighs more than it would in use."""
DTYPES = {"float32": 32, "bfloat16": 16}
"""Bits per value; bfloat16 matmuls may be computed in float32."""
PER_BIT = 3
MOST_COST = 0.01


def build(data: Path, output: Path, settings: dict[str, Any]) -> tuple[Any, Any]:
    """Build a training run with steps whose audits record their findings."""
    from launcher.training.hooks import step_hooks
    from launcher.training.hooks.audit import StepAudit
    from launcher.training.setup import build_run
    from launcher.training.train_step import TrainStep

    class KeepingAudit(StepAudit):
        findings: tuple[Any, ...] = ()

        def _resolve(self, step: Any, *, update: bool) -> None:
            self._recording.close()
            self.findings += tuple(self._audit.finish(step.number, update=update))

    class FlippedStep(TrainStep):
        def __init__(self, run: Any) -> None:
            self.audit, self.flip = KeepingAudit(run), Flip()
            super().__init__(run, [self.audit if isinstance(hook, StepAudit) else hook for hook in step_hooks(run)])

        def forward_backward(self, step: Any) -> Any:
            self.flip.seen, self.flip.is_counting = 0, True
            try:
                return super().forward_backward(step)
            finally:
                self.flip.is_counting = False

        def __call__(self, progress: Any) -> Any:
            self.audit.findings = ()
            with self.flip:
                return super().__call__(progress)

    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()):
        run = build_run(load_config(data, output, settings), torch.device("cpu"))
    return run, FlippedStep(run)


def find_flips(data: Path, output: Path, settings: dict[str, Any], plan: dict[str, int]) -> dict[str, Any]:
    """Return false alarms in clean steps, then findings for flipped bits."""
    run, take = build(data, output, settings)
    auditor, rank, progress, drawn = take.audit._audit, run.mesh.rank, run.progress, Random(0)
    alarms, kinds = 0, Counter()
    for _ in range(plan["clean"]):
        progress, record = take(progress)
        kinds[record["audited"]] += 1
        alarms += bool(take.audit.findings)
    calls = take.flip.seen
    flips: list[dict[str, Any]] = []
    wanted = [("looked_at", n % plan["bits"]) for n in range(plan["bits"] * plan["per_bit"])]
    wanted += [("any", drawn.randrange(plan["bits"])) for _ in range(plan["any"])]
    while wanted:
        step = progress.step + 1
        where, bit = wanted[-1]
        victim, call = drawn.randrange(RANKS), drawn.randrange(1, calls + 1)
        is_product = auditor.kind_of(step) == "product"
        if where == "looked_at":
            call = drawn.choice(looked_at(auditor._generator(step, victim), calls))
        take.flip.call, take.flip.bit = 0, bit
        # Draws are the same on every rank; one rank gets the fault.
        if rank == victim and (is_product or where == "any"):
            take.flip.call = call
        progress, _ = take(progress)
        # A flip in a step whose attention or update is audited is not found, and counts as missed.
        if is_product or where == "any":
            wanted.pop()
            found = take.audit.findings
            named = [x for x in found if x.is_named and list(x.candidate_ranks) == [victim] and x.of == victim]
            flips.append({"where": where, "bit": bit, "found": bool(found), "named": len(named) == len(found) > 0})
    run.prefetcher.close()
    return {"alarms": alarms, "kinds": dict(kinds), "calls": calls, "flips": flips}


def measure_cost(data: Path, output: Path, rounds: int) -> dict[str, Any]:
    """Measure CPU seconds for a plain step and each kind of audited step, and an audit's memory."""
    from parallel.audit.operation_audit import SHARES

    run, take = build(data, output, {**COSTS, "run.audit_every": 2})
    progress = run.progress
    seconds: dict[str, list[float]] = {kind: [] for kind in ("plain", *SHARES)}
    peaks: dict[str, list[float]] = {kind: [] for kind in seconds}
    # Only the first audit compares the ranks.
    for _ in range(4):
        progress, _ = take(progress)
    # Measure memory in separate steps: peak tracking takes CPU time.
    for found, least in ((seconds, rounds), (peaks, 1)):
        while min(map(len, found.values())) < least:
            dist.barrier()
            with contextlib.ExitStack() as stack:
                memory = None
                if found is peaks:
                    memory = stack.enter_context(PeakMemory())
                before = time.process_time()
                progress, record = take(progress)
                value = time.process_time() - before
                if memory is not None:
                    value = memory.peak
            found[record.get("audited", "plain")].append(value)
    run.prefetcher.close()
    return {"seconds": seconds, "peaks": peaks}


def costs(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine all ranks' results: the minimum time per kind of step, since noise only adds."""
    from launcher.config.config_sections import RunSection
    from parallel.audit.operation_audit import SHARES

    seconds = {kind: sum(min(rank["seconds"][kind]) for rank in ranks) for kind in ranks[0]["seconds"]}
    peaks = {kind: max(max(rank["peaks"][kind]) for rank in ranks) for kind in ranks[0]["peaks"]}
    mean = sum(share * seconds[kind] for kind, share in SHARES.items()) / sum(SHARES.values())
    extra = mean / seconds["plain"] - 1
    every = RunSection().audit_every
    return {
        "cpu_seconds": {kind: round(value, 3) for kind, value in seconds.items()},
        "ratio": {kind: round(value / seconds["plain"], 3) for kind, value in seconds.items()},
        "extra_of_a_step": round(extra, 4),
        "every": every,
        "share_at_default": round(extra / every, 6),
        "rise_mib": round((max(peaks.values()) - peaks["plain"]) / 2**20, 1),
    }


def summarize(dtype: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return the detected fractions for one dtype."""
    flips = found["flips"]
    by_bit = {}
    for bit in range(DTYPES[dtype]):
        of_bit = [x for x in flips if x["bit"] == bit and x["where"] == "looked_at"]
        by_bit[bit] = [sum(x["found"] for x in of_bit), len(of_bit)]
    anywhere = [x for x in flips if x["where"] == "any"]
    seen = [x for x in flips if x["found"]]
    return {
        "dtype": dtype,
        "clean_steps": sum(found["kinds"].values()),
        "false_alarms": found["alarms"],
        "kinds": found["kinds"],
        "products_of_a_rank": found["calls"],
        "found_by_bit": by_bit,
        "looked_at": [sum(x[0] for x in by_bit.values()), sum(x[1] for x in by_bit.values())],
        "any": [sum(x["found"] for x in anywhere), len(anywhere)],
        "named_right": [sum(x["named"] for x in seen), len(seen)],
    }


def main() -> int:
    """Print and save the results; return 1 if one is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse(parser, "20 clean steps, one flip a position and two rounds")
    clean, some, rounds = (500, 100, 4) if not options.quick else (20, 10, 2)
    per_bit = 1 if options.quick else PER_BIT
    results = []
    with tempfile.TemporaryDirectory(prefix="longctx-audit-") as name:
        data = make_shards(Path(name))
        for dtype, bits in DTYPES.items():
            settings = {**TINY, "train.dtype": dtype}
            plan = {"clean": clean, "bits": bits, "per_bit": per_bit, "any": some}
            found = run_ranks(find_flips, RANKS, data, Path(name) / dtype, settings, plan, preload=PRELOAD)
            results.append(summarize(dtype, found[0]))
            print(results[-1], flush=True)
        cost = costs(run_ranks(measure_cost, 2, data, Path(name) / "costs", rounds, preload=PRELOAD))
        print(cost, flush=True)
    bounds = [Bound("share of a step's CPU seconds at the default", cost["share_at_default"], MOST_COST)]
    for result in results:
        case = result["dtype"]
        found, flipped = result["looked_at"]
        named, seen = result["named_right"]
        bounds += [
            Bound("false alarms", result["false_alarms"], 0, case),
            Bound("flips found in calls that are looked at", found / flipped, 1.0, case, at_least=True),
            Bound("ranks named right", named / seen, 1.0, case, at_least=True),
        ]
    return conclude("audit", {"flips": results, "cost": cost}, bounds, options)


if __name__ == "__main__":
    sys.exit(main())

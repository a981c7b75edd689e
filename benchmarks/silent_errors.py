"""Cost of detecting silent errors: a step's CPU seconds for checksums of messages, weights and moments.

    python -m benchmarks.silent_errors [--quick]

Two ranks take steps of a small decoder with ``parallel.check_rows = "on"`` and ``run.replicas_every = 1``. The main
thread's CPU seconds are measured for the step, for all message checksums, and for each replica comparison; results are
the slower rank's medians. Expected seconds follow from the bytes and the rate at which one process checksums 64 MiB.
Times of processes on common cores vary, but fractions of one thread's seconds hardly do. ``--save`` writes
``benchmarks/results/KIND/silent_errors.json``; exit code 1 if a fraction is outside its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.ranks import run_ranks
from benchmarks.start import make_shards
from benchmarks.start_memory import load_config

RANKS = 2
REPLICAS_EVERY = 20
"""Steps between two comparisons for which the fraction of a step is reported."""
MESSAGES, REPLICAS = 0.02, 0.005
"""Upper limits as fractions of a step."""
PRELOAD = ("launcher.training.setup", "launcher.checkpoint.background_saver", "deepspeed.module_inject")
COMMON = {
    **{"model.vocab_size": 1024, "model.hidden_size": 512, "model.num_layers": 4, "model.num_heads": 8},
    **{"model.head_dim": 64, "model.num_kv_heads": 4, "model.ffn_size": 1376},
    **{"train.dtype": "float32", "train.steps": 1000, "checkpoint.every_steps": 0, "validation.rows": 0},
    **{"data.seq_len": 2048, "train.tokens_per_step": 2048, "parallel.context": 2, "run.replicas_every": 1},
}
# Message bytes grow with the width, arithmetic with its square.
WIDE = {"model.hidden_size": 1024, "model.num_heads": 16, "model.num_kv_heads": 8, "model.ffn_size": 2752}
EXPERTS = {"model.num_experts": 8, "model.experts_per_token": 2, "model.expert_ffn_size": 688, "parallel.expert": 2}
CASES: dict[str, dict[str, Any]] = {
    "ring, 2,048 tokens, zigzag": {"parallel.layout": "zigzag"},
    "ring, 8,192 tokens, zigzag": {"parallel.layout": "zigzag", "data.seq_len": 8192, "train.tokens_per_step": 8192},
    "all-gather, 2,048 tokens": {"parallel.layout": "zigzag", "parallel.transport": "all_gather"},
    "Ulysses, 2,048 tokens": {"parallel.ulysses": 2},
    "ring and 8 experts over 2 ranks": {**EXPERTS, "parallel.layout": "zigzag"},
    "the same, width 1,024": {**EXPERTS, **WIDE, "model.expert_ffn_size": 1376, "parallel.layout": "zigzag"},
}


class Clock:
    """This thread's CPU seconds within some functions, nested calls counted once."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def around(self, owner: Any, name: str) -> None:
        """Count the function's seconds from now on."""
        function: Callable = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            self._depth += 1
            began = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - began

        setattr(owner, name, timed)

    def take(self) -> float:
        """Return the seconds since the last call."""
        found, self.seconds = self.seconds, 0.0
        return found


def measure(data: Path, output: Path, settings: dict[str, Any], steps: int) -> dict[str, float]:
    """Return one rank's medians over steps."""
    from launcher.training.setup import build_run
    from launcher.training.train_step import TrainStep
    from parallel.comm.messages import ledger as ledgers
    from parallel.comm.messages.message_checksum import bit_sum
    from parallel.zero.replica_check import Replicas

    logging.disable(logging.CRITICAL)
    messages, replicas = Clock(), Clock()
    for owner, name in ((ledgers.Ledger, "post"), (ledgers.Ledger, "post_same"), (ledgers.Ledger, "balance")):
        messages.around(owner, name)
    messages.around(ledgers.Arrival, "note")
    messages.around(ledgers.Ledger, "settle")
    replicas.around(Replicas, "compare")
    replicas.around(Replicas, "remember")
    summed = {"bytes": 0, "messages": 0}

    def counted(tensors: Any) -> Any:
        summed["bytes"] += sum(x.nbytes for x in tensors)
        summed["messages"] += 1
        return bit_sum(tensors)

    ledgers.bit_sum = counted
    with contextlib.redirect_stdout(io.StringIO()):
        run = build_run(load_config(data, output, settings), torch.device("cpu"))
    take, progress = TrainStep(run), run.progress
    progress, _ = take(progress)
    found: dict[str, list[float]] = {name: [] for name in ("step", "of_messages", "of_replicas", "bytes", "messages")}
    for _ in range(steps):
        messages.take()
        replicas.take()
        summed.update(bytes=0, messages=0)
        began = time.thread_time()
        progress, _ = take(progress)
        found["step"].append(time.thread_time() - began)
        found["of_messages"].append(messages.take())
        found["of_replicas"].append(replicas.take())
        # Rows are packed: each step sends other keys.
        found["bytes"].append(summed["bytes"])
        found["messages"].append(summed["messages"])
    run.prefetcher.close()
    rates = []
    for _ in range(5):
        x, began = torch.ones(16 << 20), time.thread_time()
        bit_sum([x])
        rates.append(x.nbytes / (time.thread_time() - began))
    medians = {name: statistics.median(of) for name, of in found.items()}
    return {
        **medians,
        "predicted": medians["bytes"] / max(rates),
        "rate": max(rates),
    }


def row_of(case: str, ranks: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the slower rank's results, and fractions of its step."""
    worst = max(ranks, key=lambda rank: rank["of_messages"] / rank["step"])
    return {
        "case": case,
        **worst,
        "messages_share": worst["of_messages"] / worst["step"],
        "replicas_share": worst["of_replicas"] / worst["step"] / REPLICAS_EVERY,
    }


def bounds_of(rows: Sequence[dict[str, Any]]) -> list[Bound]:
    """Return the bounds on the checks' cost."""
    why = "about twice the most that runs on two cores have taken"
    bounds = []
    for row in rows:
        for what, name, most in (
            ("share of a step for sums of messages", "messages_share", MESSAGES),
            (f"share of a step for replicas, every {REPLICAS_EVERY} steps", "replicas_share", REPLICAS),
        ):
            bounds.append(Bound(what, row[name], most, row["case"], why, again=()))
    return bounds


def main() -> int:
    """Measure, print and save each case; return 1 if a fraction is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse(parser, "two steps of the first case")
    cases, steps = CASES, 7
    if options.quick:
        cases, steps = dict(list(CASES.items())[:1]), 2
    rows = []
    with tempfile.TemporaryDirectory(prefix="longctx-silent-") as place:
        data = make_shards(Path(place))
        for number, (name, changed) in enumerate(cases.items()):
            settings = {**COMMON, **changed}
            ranks = run_ranks(measure, RANKS, data, Path(place) / f"run{number}", settings, steps, preload=PRELOAD)
            rows.append(row_of(name, ranks))
            print(rows[-1], flush=True)
    return conclude("silent_errors", {"steps": steps, "rows": rows}, bounds_of(rows), options)


if __name__ == "__main__":
    sys.exit(main())

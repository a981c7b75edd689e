"""What it costs to look for silent errors: CPU seconds of a step that go into sums of messages, weights and moments.

    python -m benchmarks.silent_errors [--quick]

Two ranks take steps of a small decoder with ``parallel.check_rows = "on"`` and ``run.replicas_every = 1``. The CPU
seconds of the main thread are taken around the step, around all that looks at messages, and around each comparison of
what ranks hold; figures are the medians of the slower rank. Seconds are predicted from the bytes and the rate at which
one process sums 64 MiB. Times of processes that share cores differ, shares of one thread's seconds hardly do.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine
from benchmarks.ranks import run_ranks
from benchmarks.start import make_shards
from benchmarks.start_memory import load_config

RANKS = 2
PRELOAD = ("launcher.training.setup", "launcher.checkpoint.saver", "deepspeed.module_inject")
COMMON = {
    **{"model.vocab_size": 1024, "model.hidden_size": 512, "model.num_layers": 4, "model.num_heads": 8},
    **{"model.head_dim": 64, "model.num_kv_heads": 4, "model.ffn_size": 1376},
    **{"train.dtype": "float32", "train.steps": 1000, "checkpoint.every_steps": 0, "validation.rows": 0},
    **{"data.seq_len": 2048, "train.tokens_per_step": 2048, "parallel.context": 2, "run.replicas_every": 1},
}
EXPERTS = {"model.num_experts": 8, "model.experts_per_token": 2, "model.expert_ffn_size": 688, "parallel.expert": 2}
CASES: dict[str, dict[str, Any]] = {
    "ring, 2,048 tokens, zigzag": {"parallel.layout": "zigzag"},
    "ring, 8,192 tokens, zigzag": {"parallel.layout": "zigzag", "data.seq_len": 8192, "train.tokens_per_step": 8192},
    "all-gather, 2,048 tokens": {"parallel.layout": "zigzag", "parallel.transport": "all_gather"},
    "Ulysses, 2,048 tokens": {"parallel.ulysses": 2},
    "ring and 8 experts over 2 ranks": {**EXPERTS, "parallel.layout": "zigzag"},
}


class Clock:
    """CPU seconds of this thread within some functions, nested calls counted once."""

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
        """The seconds since the last call."""
        found, self.seconds = self.seconds, 0.0
        return found


def measure(data: Path, output: Path, settings: dict[str, Any], steps: int) -> dict[str, float]:
    """Medians over steps of one rank."""
    from launcher.training.setup import build_run
    from launcher.training.step import TrainStep
    from parallel.runtime.messages import ledger as ledgers
    from parallel.runtime.messages.sums import bit_sum
    from parallel.zero.replicas import Replicas

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
        run = build_run(load_config(data, output, settings).resolve(native_bfloat16=True), torch.device("cpu"))
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
    run.feed.close()
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


def main() -> int:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description="What it costs to look for silent errors.")
    parser.add_argument("--quick", action="store_true", help="two steps of the first case")
    options = parser.parse_args()
    cases, steps = CASES, 7
    if options.quick:
        cases, steps = dict(list(CASES.items())[:1]), 2
    out = sys.stdout
    out.write(f"{machine()}\n\n")
    out.write(
        "| case | step, CPU s | messages | MiB summed | predicted s | measured s | share | replicas s | every 20 |\n"
    )
    out.write("|---|--:|--:|--:|--:|--:|--:|--:|--:|\n")
    with tempfile.TemporaryDirectory(prefix="longctx-silent-") as place:
        data = make_shards(Path(place))
        for number, (name, changed) in enumerate(cases.items()):
            settings = {**COMMON, **changed}
            ranks = run_ranks(measure, RANKS, data, Path(place) / f"run{number}", settings, steps, preload=PRELOAD)
            worst = max(ranks, key=lambda rank: rank["of_messages"] / rank["step"])
            share, tenth = worst["of_messages"] / worst["step"], worst["of_replicas"] / worst["step"] / 20
            out.write(
                f"| {name} | {worst['step']:.2f} | {worst['messages']:.0f} | {worst['bytes'] / 2**20:.1f} | "
                f"{worst['predicted']:.4f} | {worst['of_messages']:.4f} | {share:.2%} | "
                f"{worst['of_replicas']:.3f} | {tenth:.2%} |\n"
            )
            out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

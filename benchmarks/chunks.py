"""Layers by chunks compared with whole layers: CPU seconds, resident memory, and rows of a million tokens.

    python -m benchmarks.chunks [--quick] [--long [windows] [full]]

A model with 4 layers and width 512 in float32, one process with one thread: forward, backward and AdamW's step. The
table has a row of 16,384 tokens, three windowed layers and a linear one, for each way to keep and store activations:
whole layers with recomputation, then token chunks with everything on the device, in host memory, and on disk. They take
turns, and the minimum CPU seconds count. Memory is the resident peak above the model, its gradients and AdamW's
moments. ``--long`` measures instead 1,048,576 tokens with that model, or 131,072 with full attention in all layers, or
both, stored on disk: an hour each. Results of both kinds are kept together.

Layers by chunks may take 5 % more CPU seconds than whole ones. The bound on memory is 35 KiB per token for width 4,096
in bfloat16 (x, q, k, v, o and their gradients, with one head group's attention at a time), scaled to this width and
float32, times 1.5, plus 200 MB. ``--save`` writes ``benchmarks/results/KIND/chunks.json``; exit code 1 if a result is
outside its bound.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.machine import RESULTS, machine, processor_kind
from benchmarks.ranks import return_freed_memory, run_ranks, with_resident_rise
from longctx.config import ModelConfig

ROUNDS = 3
CPU_BOUND = 1.05
WIDTH, CHUNK_TOKENS, HEAD_GROUPS = 512, 2048, 4
LONGEST = {"windows": 1 << 20, "full": 1 << 17}
"""Tokens in each model's long row."""
KIB_A_TOKEN = 35 * WIDTH / 4096 * 2
"""The same values as 35 KiB at width 4,096 in bfloat16."""
LAYERS = {"windows": ("window", "window", "window", "linear"), "full": ("full",)}
WAYS = {
    "whole": {"keep": "attention"},
    "chunks": {"keep": "attention", "chunk_tokens": CHUNK_TOKENS},
    "chunks, host": {
        "keep": "attention",
        "chunk_tokens": CHUNK_TOKENS,
        "head_groups": HEAD_GROUPS,
        "store": "host",
    },
    "chunks, disk": {
        "keep": "attention",
        "chunk_tokens": CHUNK_TOKENS,
        "head_groups": HEAD_GROUPS,
        "store": "disk",
    },
}


@dataclass(frozen=True)
class Case:
    """A row, the model's layers and how they are computed."""

    way: str
    num_tokens: int
    layers: str = "windows"

    @property
    def bound_mib(self) -> float:
        """Maximum MiB above the model."""
        return 1.5 * KIB_A_TOKEN * self.num_tokens / 1024 + 200e6 / 2**20

    def config(self) -> ModelConfig:
        """Return the model's config."""
        layers, window = LAYERS[self.layers], 0
        if "window" in layers:
            window = 512
        return ModelConfig(
            layers=layers,
            window=window,
            vocab_size=1024,
            hidden_size=WIDTH,
            num_layers=4,
            num_heads=8,
            num_kv_heads=8,
            head_dim=64,
            ffn_size=1408,
            max_positions=1 << 20,
        )


def measure(case: Case) -> dict[str, Any]:
    """Run one step; return its loss, CPU and wall seconds, and peak memory in MiB."""
    from longctx.batch import Batch, PackedDocuments
    from longctx.model.decoder import Decoder
    from longctx.model.training_pass import Execution
    from longctx.objectives.causal_lm import CausalLM

    return_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        way = dict(WAYS[case.way])
        if way.get("store") == "disk":
            way["store_path"] = folder
        lm = CausalLM(Decoder(case.config(), execution=Execution(**way)))
        optimizer = torch.optim.AdamW(lm.parameters())

        def step(num_tokens: int) -> float:
            generator = torch.Generator().manual_seed(num_tokens)
            tokens = torch.randint(1024, (1, num_tokens), generator=generator)
            batch = Batch(
                tokens=tokens,
                targets=tokens.roll(-1, 1),
                positions=torch.arange(num_tokens)[None],
                document_ids=torch.zeros_like(tokens),
                documents=PackedDocuments.of([0, num_tokens]),
            )
            loss = lm.loss_sum(lm(batch))
            (loss["objective"] / num_tokens).backward()
            optimizer.step()
            for p in lm.parameters():
                assert p.grad is not None
                p.grad.zero_()
            return float(loss["nll"]) / num_tokens

        # The first use of anything is not counted; gradients and moments exist from now on.
        step(256)
        wall, cpu = time.perf_counter(), time.process_time()
        loss, rise = with_resident_rise(lambda: step(case.num_tokens))
        seconds = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    return {"loss": loss, **seconds, "rise_mib": rise}


def row_of(case: Case) -> dict[str, Any]:
    """Return a case's results as a row."""
    (found,) = run_ranks(measure, 1, case, timeout=4 * 3600, preload=("longctx.objectives.causal_lm",))
    figures = {name: round(value, 6) for name, value in found.items()}
    each = 1024 * found["rise_mib"] / case.num_tokens
    return {
        **{"layers": case.layers, "tokens": case.num_tokens, "way": case.way, **figures},
        "kib_a_token": round(each, 2),
    }


def best_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the minimum seconds and the maximum memory."""
    best = dict(rows[0])
    for row in rows[1:]:
        assert row["loss"] == best["loss"], "one case gave two losses"
        for name in ("seconds", "cpu_seconds"):
            best[name] = min(best[name], row[name])
        for name in ("rise_mib", "kib_a_token"):
            best[name] = max(best[name], row[name])
    return best


def bounds(table: list[dict[str, Any]], longest: list[dict[str, Any]]) -> Iterator[Bound]:
    """Return the rows' bounds; cases without a measurement have no bound."""
    if table:
        of_way = {row["way"]: row for row in table}
        ratio = of_way["chunks"]["cpu_seconds"] / of_way["whole"]["cpu_seconds"]
        yield Bound("CPU seconds by chunks over whole layers", ratio, CPU_BOUND, again=())
    for row in table[1:]:
        yield Bound("loss beside that of whole layers", abs(row["loss"] / table[0]["loss"] - 1), 1e-6, case=row["way"])
    for row in table[3:] + longest:
        limit = Case(row["way"], row["tokens"], row["layers"]).bound_mib
        yield Bound("MiB above the model", row["rise_mib"], limit, case=f"{row['layers']}, {row['tokens']:,} tokens")


def print_row(row: dict[str, Any]) -> None:
    """Print one row for the console."""
    print(*(f"{key}={value}" for key, value in row.items()), flush=True)


def measured_ways(length: int, rounds: int) -> list[dict[str, Any]]:
    """Measure a row of this many tokens in each way; the ways take turns."""
    measured: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, rows in measured.items():
            rows.append(row_of(Case(way, length)))
            print_row(rows[-1])
    return [best_of(rows) for rows in measured.values()]


def measured_longest(which: Sequence[str]) -> list[dict[str, Any]]:
    """Measure these models' long rows."""
    rows = []
    for layers in which:
        rows.append(row_of(Case("chunks, disk", LONGEST[layers], layers)) | {"date": machine()["date"]})
        print_row(rows[-1])
    return rows


def saved() -> dict[str, Any]:
    """Return the saved results for this kind of processor."""
    path = RESULTS / processor_kind() / "chunks.json"
    if not path.exists():
        return {"table": [], "longest": []}
    return json.loads(path.read_text())


def with_newest(earlier: list[dict[str, Any]], newest: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each measured model's newest long row."""
    rows = {row["layers"]: row for row in earlier + newest}
    return [rows[layers] for layers in LONGEST if layers in rows]


def main() -> int:
    """Print and save the rows; return 1 if a result is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", nargs="*", choices=LONGEST, help="long rows alone, an hour each: of these models")
    options = parse(parser, quick="a row of 8,192 tokens, once")
    if options.long is not None:
        newest = measured_longest(options.long or list(LONGEST))
        # Read after hours of measuring: another process may have saved other rows meanwhile.
        table, longest = saved()["table"], with_newest(saved()["longest"], newest)
    elif options.quick:
        table, longest = measured_ways(8192, 1), []
    else:
        table = measured_ways(16_384, ROUNDS)
        longest = saved()["longest"]
    content = {
        **{"chunk_tokens": CHUNK_TOKENS, "head_groups": HEAD_GROUPS, "rounds": ROUNDS},
        **{"table": table, "longest": longest},
    }
    return conclude("chunks", content, list(bounds(table, longest)), options, whole=True)


if __name__ == "__main__":
    sys.exit(main())

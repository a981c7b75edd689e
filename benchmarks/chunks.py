"""Layers by chunks beside whole layers: CPU seconds, resident memory, and rows of a million tokens in one process.

    python -m benchmarks.chunks [--quick] [--long [windows] [full]]

A model of 4 layers and width 512 in float32, one process with one thread: forward, backward and AdamW's step. The table
has a row of 16,384 tokens, three windowed layers and a linear one, in the ways to keep and store: whole layers that
are recomputed, then chunks with everything on the device, in other memory, and on a disk. They take turns, and of each
the least CPU seconds count. Memory is the resident peak over what was resident with the model, its gradients and
AdamW's moments loaded. ``--long`` measures instead 1,048,576 tokens of that model, or 131,072 of one whose layers all
see everything, or both, stored on a disk: an hour each. Results of both kinds are kept side by side.

Layers by chunks may take 5 % more CPU seconds than whole ones. The bound on memory is 35 KiB a token of width 4,096 in
bfloat16 (x, q, k, v, o and their gradients where attention takes a group of heads at a time), for this width and
float32, times 1.5, and 200 MB. ``--save`` writes ``benchmarks/results/KIND/chunks.json``; exit code 1 when a figure is
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
"""Tokens of the long row of each model."""
KIB_A_TOKEN = 35 * WIDTH / 4096 * 2
"""The same values as 35 KiB of width 4,096 in bfloat16."""
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
    """A row, the model's layers and the way they are computed."""

    way: str
    num_tokens: int
    layers: str = "windows"

    @property
    def bound_mib(self) -> float:
        """Most MiB above the model."""
        return 1.5 * KIB_A_TOKEN * self.num_tokens / 1024 + 200e6 / 2**20

    def config(self) -> ModelConfig:
        """The model."""
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
    """One step: its loss, CPU and wall seconds, and MiB by which memory peaked."""
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

        # The first use of anything is not counted; gradients and moments are there from now on.
        step(256)
        wall, cpu = time.perf_counter(), time.process_time()
        loss, rise = with_resident_rise(lambda: step(case.num_tokens))
        seconds = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    return {"loss": loss, **seconds, "rise_mib": rise}


def row_of(case: Case) -> dict[str, Any]:
    """The figures of a case."""
    (found,) = run_ranks(measure, 1, case, timeout=4 * 3600, preload=("longctx.objectives.causal_lm",))
    figures = {name: round(value, 6) for name, value in found.items()}
    each = 1024 * found["rise_mib"] / case.num_tokens
    return {
        **{"layers": case.layers, "tokens": case.num_tokens, "way": case.way, **figures},
        "kib_a_token": round(each, 2),
    }


def best_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The least seconds, the most memory."""
    best = dict(rows[0])
    for row in rows[1:]:
        assert row["loss"] == best["loss"], "one case gave two losses"
        for name in ("seconds", "cpu_seconds"):
            best[name] = min(best[name], row[name])
        for name in ("rise_mib", "kib_a_token"):
            best[name] = max(best[name], row[name])
    return best


def bounds(table: list[dict[str, Any]], longest: list[dict[str, Any]]) -> Iterator[Bound]:
    """What the rows may be; of what was not measured yet there is no bound."""
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
    """A row, for people."""
    print(*(f"{key}={value}" for key, value in row.items()), flush=True)


def measured_ways(length: int, rounds: int) -> list[dict[str, Any]]:
    """A row of so many tokens in each way; the ways take turns."""
    measured: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, rows in measured.items():
            rows.append(row_of(Case(way, length)))
            print_row(rows[-1])
    return [best_of(rows) for rows in measured.values()]


def measured_longest(which: Sequence[str]) -> list[dict[str, Any]]:
    """The long rows of these models."""
    rows = []
    for layers in which:
        rows.append(row_of(Case("chunks, disk", LONGEST[layers], layers)) | {"date": machine()["date"]})
        print_row(rows[-1])
    return rows


def saved() -> dict[str, Any]:
    """What was measured on this kind of processor before."""
    path = RESULTS / processor_kind() / "chunks.json"
    if not path.exists():
        return {"table": [], "longest": []}
    return json.loads(path.read_text())


def with_newest(earlier: list[dict[str, Any]], newest: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One long row of each model that was measured, the newest."""
    rows = {row["layers"]: row for row in earlier + newest}
    return [rows[layers] for layers in LONGEST if layers in rows]


def main() -> int:
    """Print the rows, save them, and fail when a figure is outside its bound."""
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

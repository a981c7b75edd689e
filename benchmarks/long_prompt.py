"""A long prompt and a short answer on two ranks, compared with one process: memory, CPU seconds, and their growth.

    python -m benchmarks.long_prompt [--quick]

A dense model with 2 layers and grouped-query heads in float32, one thread per process, gloo between ranks. Each process
reads a prompt of 65,536 tokens in token chunks of 2,048, then adds 64 tokens. Memory is the resident peak above the
loaded model; CPU seconds are each process's own. One process and two ranks take turns for three rounds: the minimum CPU
seconds and the maximum memory count. Then two ranks read prompts of 16,384 to 131,072 tokens with a narrower model, and
add 32: the peak without the cache must stay constant, and a new token's cost may grow at most in proportion to the
keys. With windows alone, whose keys are freed, it must not grow at all. There glibc is set to return freed memory at
once: the memory it retains by chance would be a fifth of so small a peak. ``--save`` writes
``benchmarks/results/KIND/long_prompt.json``; exit code 1 if a result is outside its bound.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.ranks import return_freed_memory, run_ranks, with_resident_rise
from longctx.config import ModelConfig

NEW_TOKENS, CHUNK_TOKENS = 64, 2048
LATER_TOKENS = 32
"""New tokens after the growing prompts, after their memory is measured."""
ROUNDS = 3
"""Rounds of one process and two ranks: other load on a machine changes a single measurement by a tenth."""
MEMORY_BOUND, CPU_BOUND, GROWTH_BOUND, FLAT_BOUND = 0.6, 1.1, 1.15, 1.3
HEAP_STEP_MIB = 1.0
HEAP_WHY = "a heap grows by steps of 1 MiB, a sixth of what there is beside the cache of 16,384 tokens"


@dataclass(frozen=True)
class Case:
    """One model and one prompt."""

    prompt_tokens: int
    num_heads: int
    num_kv_heads: int
    num_layers: int = 2
    window: int = 0
    """Keys that a query in every layer sees; 0 for all."""

    def config(self) -> ModelConfig:
        """Return the model's config; its head size is 64."""
        layers = ("full",)
        if self.window:
            layers = ("window",)
        return ModelConfig(
            layers=layers,
            window=self.window,
            vocab_size=1024,
            hidden_size=64 * self.num_heads,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=64,
            ffn_size=128 * self.num_heads,
            max_positions=1 << 20,
        )

    @property
    def cache_mib(self) -> float:
        """Keys and values of the prompt on all ranks, in float32."""
        rows = self.prompt_tokens
        if self.window:
            rows = min(rows, self.window)
        return 4 * 2 * 64 * self.num_kv_heads * self.num_layers * rows / 2**20


def measure(case: Case, new_tokens: int, later_tokens: int) -> dict[str, Any]:
    """Return, on one rank, the tokens, CPU seconds for the prompt and for the new tokens, and peak memory in MiB.

    For the later tokens only CPU seconds are measured, per token. With them, freed memory is returned at once.
    """
    from longctx.generation import GenerationOptions, stream
    from parallel.mesh import Mesh
    from parallel.parallelize import build_parallel_model

    if later_tokens:
        return_freed_memory()
    mesh = Mesh.build(context=dist.get_world_size())
    decoder = build_parallel_model(case.config(), mesh, layout="zigzag").network.eval()
    prompt = torch.randint(1024, (case.prompt_tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    # The first use of anything is not counted.
    list(stream(decoder, prompt[:64], GenerationOptions(max_new_tokens=2, chunk_tokens=CHUNK_TOKENS)))

    request = GenerationOptions(max_new_tokens=new_tokens + later_tokens, chunk_tokens=CHUNK_TOKENS)
    tokens = stream(decoder, prompt, request)

    def answer() -> dict[str, Any]:
        dist.barrier()
        start = time.process_time()
        ids = [next(tokens)]
        read = time.process_time() - start
        ids += islice(tokens, new_tokens - 1)
        return {"ids": ids, "prompt_cpu_seconds": read, "cpu_seconds": time.process_time() - start}

    found, rise = with_resident_rise(answer)
    start = time.process_time()
    later = len(list(tokens))
    each = (time.process_time() - start) / max(1, later)
    return {**found, "rise_mib": rise, "cpu_ms_a_later_token": 1000 * each}


def row_of(case: Case, degree: int, new_tokens: int, later_tokens: int = 0) -> dict[str, Any]:
    """Return the worst rank's results as a row."""
    preload = ("parallel.parallelize", "longctx.generation")
    found = run_ranks(measure, degree, case, new_tokens, later_tokens, preload=preload)
    worst = {name: round(max(rank[name] for rank in found), 3) for name in found[0] if name != "ids"}
    beside = worst["rise_mib"] - case.cache_mib / degree
    return {
        **{"tokens": case.prompt_tokens, "window": case.window, "ranks": degree, "new_tokens": new_tokens, **worst},
        **{"cache_mib": case.cache_mib / degree, "beside_cache_mib": round(beside, 1), "ids": found[0]["ids"]},
    }


def best_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine several measurements of one case into a row: the minimum CPU seconds, the maximum memory."""
    best = dict(rounds[0])
    for row in rounds[1:]:
        assert row["ids"] == best["ids"], "greedy tokens of one case differ between rounds"
        for name in ("prompt_cpu_seconds", "cpu_seconds", "cpu_ms_a_later_token"):
            best[name] = min(best[name], row[name])
        for name in ("rise_mib", "beside_cache_mib"):
            best[name] = max(best[name], row[name])
    return best


def bounds(pair: list[dict[str, Any]], growth: list[dict[str, Any]], windows: list[dict[str, Any]]) -> Iterator[Bound]:
    """Return the rows' bounds."""
    one, two = pair
    yield Bound("memory rise over one process's", two["rise_mib"] / one["rise_mib"], MEMORY_BOUND)
    yield Bound(
        "CPU seconds over half of one process's", 2 * two["cpu_seconds"] / one["cpu_seconds"], CPU_BOUND, again=()
    )
    same = sum(a == b for a, b in zip(one["ids"], two["ids"], strict=True))
    yield Bound("new ids that are one process's", same, len(one["ids"]), at_least=True)
    if growth:
        first, last = growth[0], growth[-1]
        ends = f"at {last['tokens']:,} tokens over {first['tokens']:,}"
        grown = (last["beside_cache_mib"] - HEAP_STEP_MIB) / first["beside_cache_mib"]
        yield Bound(f"memory beside the cache {ends}", grown, GROWTH_BOUND, why=HEAP_WHY, again=())
        keys = last["tokens"] / first["tokens"]
        each = _new_token(last) / _new_token(first)
        yield Bound(f"CPU seconds of a new token {ends}", each, keys * GROWTH_BOUND, again=())
        flat = _new_token(windows[-1]) / _new_token(windows[0])
        yield Bound(f"CPU seconds of a new token with windows {ends}", flat, FLAT_BOUND, again=())


def _new_token(row: dict[str, Any]) -> float:
    return row["cpu_ms_a_later_token"]


def print_row(row: dict[str, Any]) -> None:
    """Print one row for the console."""
    print(*(f"{key}={value}" for key, value in row.items() if key != "ids"), flush=True)


def main() -> int:
    """Print and save the tables; return 1 if a result is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse(parser, quick="a prompt of 8,192 tokens, and no growth")
    # PyTorch records the last 2,000 messages, which a long prompt reaches and a short one does not.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # read by each process that sends
    length, lengths = 65_536, (16_384, 32_768, 65_536, 131_072)
    if options.quick:
        length, lengths = 8192, ()
    growth, windows = [], []
    rounds: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for _ in range(ROUNDS):
        for degree, rows in rounds.items():
            rows.append(row_of(Case(length, num_heads=4, num_kv_heads=2), degree, NEW_TOKENS))
            print_row(rows[-1])
    pair = [best_of(rows) for rows in rounds.values()]
    for tokens in lengths:
        growth.append(row_of(Case(tokens, num_heads=1, num_kv_heads=1), 2, 1, LATER_TOKENS))
        print_row(growth[-1])
        windows.append(row_of(Case(tokens, num_heads=1, num_kv_heads=1, window=1024), 2, 1, LATER_TOKENS))
        print_row(windows[-1])
    content = {"chunk_tokens": CHUNK_TOKENS, "rounds": ROUNDS, "pair": pair, "growth": growth, "windows": windows}
    return conclude("long_prompt", content, list(bounds(pair, growth, windows)), options, whole=True)


if __name__ == "__main__":
    sys.exit(main())

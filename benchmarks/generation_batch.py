"""Several prompts at once, compared with transformers' ``generate``: tokens per second, and equality of the ids.

    python -m benchmarks.generation_batch [--quick] [--only tiny-llama-1 mixtral-8 …]

One process, float32: 1 and 8 prompts of 128 tokens, 64 new ones each, greedy. The tiny shapes have width 64, 4 layers
and a vocabulary of 1,024: time outside the matmuls dominates, so they run on one thread. On two, three quarters of
either's CPU seconds went to waking the other thread (8 prompts: 17 times per layer), and the ratio measured the
machine. The small shapes have two threads, like the others, width 256 and a vocabulary of 8,192. The others are
``benchmarks.decoder``'s, with width 512, 8 layers and a vocabulary of 32,000: with 154 MB of weights per token and
more, memory bandwidth decides, and both read the same. transformers runs ``sdpa`` and ``grouped_mm``, with its dynamic
and its static cache; the faster one counts. We run ``generate_batch``. CPU seconds are the minimum over rounds in which
all take turns in one process, whose threads sleep while they wait. ``--save`` writes
``benchmarks/results/KIND/generation_batch.json``; exit code 1 if a result is outside its bound.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import decoder
from benchmarks.bounds import Bound, conclude, of_kind, parse
from benchmarks.decoder import THREADS, Shape, in_process, theirs
from benchmarks.generation import convert, cpu_seconds

PROMPT_TOKENS, NEW_TOKENS = 128, 64
_TINY = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_SMALL = {**_TINY, "vocab_size": 8192, "hidden_size": 256, "num_attention_heads": 8, "head_dim": 32}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
SHAPES = {
    "tiny-llama": Shape("llama", {**_TINY, "intermediate_size": 176}),
    "tiny-mixtral": Shape("mixtral", {**_TINY, **_EXPERTS, "intermediate_size": 128}),
    "small-llama": Shape("llama", {**_SMALL, "intermediate_size": 688}),
    "small-mixtral": Shape("mixtral", {**_SMALL, **_EXPERTS, "intermediate_size": 512}),
    "llama": decoder.SHAPES["llama"],
    "mixtral": decoder.SHAPES["mixtral"],
}
CASES = [f"{shape}-{count}" for shape in SHAPES for count in (1, 8)]
CACHES = ("dynamic", "static")
SPEED_BOUND = {"tiny": of_kind(plain=1.1, bf16=1.1, amx=1.2), "small": 1.0, "llama": 0.95, "mixtral": 0.95}
"""Minimum of our tokens per second over transformers', by the first word in a shape's name."""
NUM_THREADS = {"tiny": 1, "small": THREADS, "llama": THREADS, "mixtral": THREADS}
ROUNDS = {"tiny": 20, "small": 10, "llama": 5, "mixtral": 5}
"""A round of the tiny shapes takes 0.1 s, so a brief load from another program weighs much."""
Continue = Callable[[int], list[list[int]]]
"""Maps a number of new tokens to those of each prompt."""


def _size(case: str) -> str:
    return case.split("-")[0]


def prompts(count: int, vocab_size: int) -> Tensor:
    """Return the ids of this many prompts, [N, T]."""
    return torch.randint(vocab_size, (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))


def build(case: str) -> dict[str, Continue]:
    """Return transformers' functions that continue the prompts, by cache, and ours, with the same weights."""
    name, count = case.rsplit("-", 1)
    reference = theirs(SHAPES[name])[0]
    # Wide embeddings: with a new model's own, the transformer blocks' mean output decides, and one token would repeat
    # forever.
    torch.nn.init.normal_(reference.get_input_embeddings().weight)
    reference = reference.float().eval()
    # Neither ends before the last token; a minimum token count would forbid the end id, and so change the choices.
    reference.generation_config.eos_token_id = None
    model = convert(reference, torch.float32)
    ids = prompts(int(count), model.config.vocab_size)

    def continue_ours(new_tokens: int) -> list[list[int]]:
        from longctx.generation.continuous_batching import generate_batch

        found = dict(generate_batch(model, ids.tolist(), new_tokens))
        return [found[index] for index in range(len(ids))]

    return {cache: with_cache(reference, ids, cache) for cache in CACHES} | {"longctx": continue_ours}


def with_cache(reference: Any, ids: Tensor, cache: str) -> Continue:
    """Return transformers' function with a cache of this kind."""

    def continue_theirs(new_tokens: int) -> list[list[int]]:
        options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
        found = reference.generate(
            ids, attention_mask=torch.ones_like(ids), cache_implementation=cache, disable_compile=True, **options
        )
        return found[:, ids.shape[1] :].tolist()

    return continue_theirs


def measure_case(case: str, rounds: int) -> dict[str, Any]:
    """Measure one table row."""
    torch.set_num_threads(NUM_THREADS[_size(case)])
    ways = build(case)
    ids = {who: way(NEW_TOKENS) for who, way in ways.items()}  # the first use of anything is not counted
    found: dict[str, list[float]] = {who: [] for who in ways}
    for _ in range(rounds):
        for who, way in ways.items():
            found[who].append(cpu_seconds(way, NEW_TOKENS))
    seconds = {who: min(times) for who, times in found.items()}
    num_tokens = NEW_TOKENS * len(ids["longctx"])
    pairs = zip(ids["dynamic"], ids["longctx"], strict=True)
    return {
        "case": case,
        "cpu_seconds": {who: round(time, 3) for who, time in seconds.items()},
        "tokens_a_cpu_second": {who: round(num_tokens / time, 1) for who, time in seconds.items()},
        "speed_ratio": round(min(seconds[cache] for cache in CACHES) / seconds["longctx"], 3),
        "same_prompts": sum(a == b for a, b in pairs),
    }


def bounds(row: dict[str, Any]) -> Iterator[Bound]:
    """Return a row's bounds."""
    case = row["case"]
    what, limit = "tokens a CPU second over transformers'", SPEED_BOUND[_size(case)]
    yield Bound(what, row["speed_ratio"], limit, case, at_least=True, again=("--only", case))
    count = int(case.rsplit("-", 1)[1])
    yield Bound("prompts whose ids are transformers'", row["same_prompts"], count, case, at_least=True)


def print_row(row: dict[str, Any]) -> None:
    """Print one row for the console."""
    cells = [f"{row['tokens_a_cpu_second'][who]:10}" for who in (*CACHES, "longctx")]
    print(f"{row['case']:16}", *cells, f"{row['speed_ratio']:7.3f}{row['same_prompts']:6}", flush=True)


def main() -> int:
    """Print and save the table; return 1 if a result is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, help="cases to run")
    options = parse(parser, quick="one round")
    print(f"{'tokens/CPU s':16}{'dynamic':>11}{'static':>11}{'ours':>11}   ratio  same")
    rows = []
    for case in options.only:
        rows.append(in_process(measure_case, case, 1 if options.quick else ROUNDS[_size(case)]))
        print_row(rows[-1])
    content = {"prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "threads": NUM_THREADS, "rows": rows}
    stated = [bound for row in rows for bound in bounds(row)]
    return conclude("generation_batch", content, stated, options, whole=set(options.only) == set(CASES))


if __name__ == "__main__":
    sys.exit(main())

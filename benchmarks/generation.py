"""Greedy generation compared with transformers' ``generate``: CPU seconds, tokens per second, and equality of the ids.

    python -m benchmarks.generation [--quick] [--only llama-float32 qwen3-fine-bfloat16 …]

One process, two threads, one prompt of 512 tokens and 128 new ones, on ``benchmarks.decoder``'s Llama and Qwen3-MoE
shapes in float32 and in bfloat16. transformers runs ``sdpa``, ``grouped_mm`` and its own cache. Both have the same
weights. CPU seconds are the minimum over rounds in which both take turns in one process, whose threads sleep while they
wait. The new tokens' own seconds are the difference from a call that adds one token. ``--save`` writes
``benchmarks/results/KIND/generation.json``; exit code 1 if a result is outside its bound.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.decoder import SHAPES, THREADS, in_process, theirs
from longctx.model.decoder import Decoder

PROMPT_TOKENS, NEW_TOKENS = 512, 128
CASES = [f"{shape}-{dtype}" for shape in ("llama", "qwen3-fine") for dtype in ("float32", "bfloat16")]
SPEED_BOUND = 1.0
"""Minimum of our tokens per second over transformers'."""
Continue = Callable[[int], list[int]]
"""Maps a number of new tokens to their ids."""


def prompt() -> Tensor:
    """Return the prompt's ids, [1, T]."""
    return torch.randint(32_000, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))


def build(case: str) -> tuple[Continue, Continue]:
    """Return transformers' function that continues the prompt, and ours, with the same weights."""
    name, dtype = split(case)
    reference = theirs(SHAPES[name])[0]
    # Wide embeddings: with a new model's own, the transformer blocks' mean output decides, and one token would repeat
    # forever.
    torch.nn.init.normal_(reference.get_input_embeddings().weight)
    reference = reference.to(dtype).eval()
    decoder = convert(reference, dtype)
    ids = prompt()

    def continue_theirs(count: int) -> list[int]:
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        found = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return found[0, ids.shape[1] :].tolist()

    def continue_ours(count: int) -> list[int]:
        from longctx.generation.loop import generate

        return generate(decoder, ids[0].tolist(), count)

    return continue_theirs, continue_ours


def split(case: str) -> tuple[str, torch.dtype]:
    """Return a case's shape name and dtype."""
    name, dtype = case.rsplit("-", 1)
    return name, getattr(torch, dtype)


def convert(reference: Any, dtype: torch.dtype) -> Decoder:
    """Return our decoder with the weights of transformers' model, from a folder that it saved."""
    from longctx.conversion import load_hf

    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        config, weights = load_hf(folder)
        decoder = Decoder(config, seed=None).to(dtype)
        decoder.load_state_dict(weights)
    return decoder.eval()


def measure_case(case: str, rounds: int) -> dict[str, Any]:
    """Measure one table row."""
    torch.set_num_threads(THREADS)
    continue_theirs, continue_ours = build(case)
    ways = {"transformers": continue_theirs, "longctx": continue_ours}
    ids = {who: way(NEW_TOKENS) for who, way in ways.items()}  # the first use of anything is not counted
    whole: dict[str, list[float]] = {who: [] for who in ways}
    first: dict[str, list[float]] = {who: [] for who in ways}
    for _ in range(rounds):
        for who, way in ways.items():
            first[who].append(cpu_seconds(way, 1))
            whole[who].append(cpu_seconds(way, NEW_TOKENS))
    seconds = {who: min(found) for who, found in whole.items()}
    prompt_seconds = {who: min(found) for who, found in first.items()}
    a_token = {who: (seconds[who] - prompt_seconds[who]) / (NEW_TOKENS - 1) for who in ways}
    alike = [a == b for a, b in zip(ids["transformers"], ids["longctx"], strict=True)]
    same_ids = NEW_TOKENS
    if False in alike:
        same_ids = alike.index(False)
    return {
        "case": case,
        "cpu_seconds": {who: round(found, 3) for who, found in seconds.items()},
        "prompt_cpu_seconds": {who: round(found, 3) for who, found in prompt_seconds.items()},
        "milliseconds_a_token": {who: round(1000 * found, 2) for who, found in a_token.items()},
        "speed_ratio": round(seconds["transformers"] / seconds["longctx"], 3),
        "same_ids": same_ids,
        "distinct_ids": len(set(ids["longctx"])),
    }


def cpu_seconds(way: Callable[[int], Any], count: int) -> float:
    """Return the CPU seconds of a continuation by this many tokens."""
    start = time.process_time()
    way(count)
    return time.process_time() - start


def bounds(row: dict[str, Any]) -> Iterator[Bound]:
    """Return a row's bounds."""
    what = "tokens a CPU second over transformers'"
    yield Bound(what, row["speed_ratio"], SPEED_BOUND, row["case"], at_least=True, again=("--only", row["case"]))
    # In bfloat16 the two round differently, so two tokens with close logits may change places.
    if row["case"].endswith("float32"):
        what = "new ids that are transformers'"
        yield Bound(what, row["same_ids"], NEW_TOKENS, row["case"], at_least=True)


def print_row(row: dict[str, Any]) -> None:
    """Print one row for the console."""
    cells = [f"{row['case']:22}"]
    for key, width in (("cpu_seconds", 8), ("prompt_cpu_seconds", 8), ("milliseconds_a_token", 8)):
        cells += [f"{row[key][who]:{width}}" for who in ("transformers", "longctx")]
    print(*cells, f"{row['speed_ratio']:7.3f}{row['same_ids']:6}{row['distinct_ids']:6}", flush=True)


def main() -> int:
    """Print and save the table; return 1 if a result is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, help="cases to run")
    options = parse(parser, quick="one round")
    print(f"{'CPU s:':22}{'theirs':>9}{'ours':>9}{'prompt':>9}{'ours':>9}{'ms/token':>9}{'ours':>9}   ratio  same  ids")
    rows = []
    for case in options.only:
        rows.append(in_process(measure_case, case, 1 if options.quick else 5))
        print_row(rows[-1])
    content = {"prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "threads": THREADS, "rows": rows}
    stated = [bound for row in rows for bound in bounds(row)]
    return conclude("generation", content, stated, options, whole=set(options.only) == set(CASES))


if __name__ == "__main__":
    sys.exit(main())

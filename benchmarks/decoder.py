"""A training step's forward and backward, compared with its floor and transformers: CPU seconds and activation memory.

    python -m benchmarks.decoder [--quick] [--only llama mixtral …]

One process, two threads, bfloat16, one row of 2048 tokens, width 512, 8 layers, a vocabulary of 32,000, no
recomputation and no optimizer. transformers runs ``sdpa`` and ``grouped_mm``. Both have the same weights, and their
losses are compared per token, by their error against transformers in float32. The floor (``benchmarks/floor.py``) is
the step's matmuls and attention alone. CPU seconds are the minimum over rounds in which all take turns in one process,
whose threads sleep while they wait; memory, from fresh processes, is the peak above weights and gradients. ``--save``
writes ``benchmarks/results/KIND/decoder.json``; exit code 1 if a result is outside its bound.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.bounds import Bound, conclude, of_kind, parse
from benchmarks.floor import Floor
from benchmarks.machine import processor_kind
from benchmarks.ranks import with_resident_rise
from longctx.batch import IGNORED_TARGET, Batch, PackedDocuments

THREADS, TOKENS = 2, 2048


@dataclass(frozen=True)
class Shape:
    """A model in transformers' names."""

    model_type: str
    options: dict[str, Any]


_COMMON = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": TOKENS,
}
SHAPES = {
    "llama": Shape("llama", {"intermediate_size": 1376, "head_dim": 64}),
    "mixtral": Shape(
        "mixtral", {"intermediate_size": 1024, "head_dim": 64, "num_local_experts": 16, "num_experts_per_tok": 2}
    ),
    "qwen3-fine": Shape(
        "qwen3_moe",
        {
            **{"head_dim": 64, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 256},
            "norm_topk_prob": True,
        },
    ),
    "deepseek-v3": Shape(
        "deepseek_v3",
        {
            **{"num_key_value_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64},
            **{"qk_rope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 32, "num_experts_per_tok": 4},
            **{"moe_intermediate_size": 256, "n_shared_experts": 1, "n_group": 4, "topk_group": 2},
            **{"first_k_dense_replace": 1, "intermediate_size": 1376},
        },
    ),
}
MEMORY_BOUND = 0.5
NLL_BOUND = 1.1
NLL_WHY = "both round to bfloat16 at the same places; medians over 2,047 tokens differ by chance"
TIME_BOUND = {
    "llama": {"plain": 0.5, "bf16": 1.0},
    "mixtral": {"plain": 0.5, "bf16": 1.0},
    "qwen3-fine": {"plain": 0.5, "bf16": 1.0},
    "deepseek-v3": {"plain": 0.45, "bf16": 0.65},
}
"""Our CPU seconds over transformers', by kind of processor."""
TIME_WHY = "without bfloat16 instructions PyTorch's bfloat16 products and attention, which transformers runs, are slow"
FLOOR_BOUND = {
    # Operations other than matmuls and attention take as long as on plain processors, on which those two take longer.
    "llama": {"plain": 1.25, "bf16": 1.2},
    "mixtral": {"plain": 1.5, "bf16": 1.5},
    "qwen3-fine": {"plain": 1.5, "bf16": 1.5},
    "deepseek-v3": {"plain": 1.5, "bf16": 1.5},
}
"""Our CPU seconds over those of the step's matmuls and attention alone, by kind of processor."""
REST_BOUND = 0.9
"""With AMX: our CPU seconds beyond the floor, over transformers' beyond it."""
REST_WHY = "with AMX products are so fast, and faster with each generation, that a ratio to them alone says little"


def theirs(shape: Shape) -> tuple[Any, Callable[[], Tensor]]:
    """Build transformers' model in bfloat16, and its step."""
    import transformers

    config = transformers.AutoConfig.for_model(shape.model_type, **{**_COMMON, **shape.options})
    config._attn_implementation = "sdpa"
    if shape.model_type != "llama":
        config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tokens = row()

    def step() -> Tensor:
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return loss.detach()

    return model, step


def ours(shape: Shape, source: Any = None) -> tuple[Any, Callable[[], Tensor]]:
    """Build our model with the same weights, from a folder that transformers saved."""
    from longctx.conversion import load_hf
    from longctx.model.decoder import Decoder
    from longctx.objectives.causal_lm import CausalLM

    model = theirs(shape)[0] if source is None else source
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config, weights = load_hf(folder)
    del model
    decoder = Decoder(config, seed=None).to(torch.bfloat16)
    decoder.load_state_dict(weights)
    lm, tokens = CausalLM(decoder), row()
    targets = tokens.roll(-1)
    targets[0, -1] = IGNORED_TARGET
    zeros = torch.zeros_like(tokens)
    positions = torch.arange(TOKENS).view(1, -1)
    one = PackedDocuments.of([0, TOKENS])
    batch = Batch(tokens=tokens, targets=targets, positions=positions, document_ids=zeros, documents=one)

    def step() -> Tensor:
        loss = lm(batch)[0] / (TOKENS - 1)
        loss.backward()
        return loss.detach()

    return lm, step


def row() -> Tensor:
    """Return the tokens, [1, T]."""
    return torch.randint(32_000, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def measure_time(name: str, rounds: int) -> dict[str, Any]:
    """Measure CPU seconds for both and for the floor's two parts, in one process by turns; return them with both
    losses.
    """
    torch.set_num_threads(THREADS)
    model, their_step = theirs(SHAPES[name])
    lm, our_step = ours(SHAPES[name], model)
    losses = [float(step()) for step in (their_step, our_step)]  # the first use of anything is not counted
    floor = Floor.build(lm.network, row())
    actions = {"transformers": their_step, "longctx": our_step} | floor.actions()
    for action in floor.actions().values():
        action()
    seconds: dict[str, list[float]] = {of: [] for of in actions}
    for _ in range(rounds):
        for of, action in actions.items():
            start = time.process_time()
            action()
            seconds[of].append(time.process_time() - start)
    return {
        "cpu_seconds": {of: round(min(found), 3) for of, found in seconds.items()},
        "losses": losses,
        "nll_error": nll_errors(model, lm.network),
    }


@torch.no_grad()
def nll_errors(model: Any, decoder: Any) -> dict[str, float]:
    """Return both libraries' median error per token loss against transformers in float32; casts ``model``.

    Per token and not of the mean, in which errors cancel by chance; the median, because rounding may change an expert
    choice, which moves a single token's loss far.
    """
    tokens = row()
    targets, positions = tokens.roll(-1), torch.arange(TOKENS).view(1, -1)

    def by_transformers() -> Tensor:
        logits = model(tokens, use_cache=False).logits[0, :-1].float()
        return nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")

    theirs_N = by_transformers()
    ours_N = decoder.token_nll(decoder(tokens, positions), targets)[0, :-1]
    model.float()
    exact_N = by_transformers()
    found = {"transformers": theirs_N, "longctx": ours_N}
    return {who: float((nll_N - exact_N).abs().median()) for who, nll_N in found.items()}


def measure_memory(name: str, who: str) -> float:
    """Measure MiB over weights and gradients in a process that runs one of the two."""
    torch.set_num_threads(THREADS)
    model, step = theirs(SHAPES[name]) if who == "transformers" else ours(SHAPES[name])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step()  # the first use of code takes memory too: oneDNN keeps up to a megabyte per matmul size
    return with_resident_rise(step)[1]


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a fresh process's result."""
    # Read when the process loads OpenMP: CPU seconds then count work, and not threads that wait for the next task.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Measure one table row."""
    timed = in_process(measure_time, name, rounds)
    their_mib, our_mib = (in_process(measure_memory, name, who) for who in ("transformers", "longctx"))
    seconds = timed["cpu_seconds"]
    floor = seconds["products"] + seconds["attention"]
    return {
        "shape": name,
        "cpu_seconds": seconds | {"floor": round(floor, 3)},
        "over_floor": {who: round(seconds[who] / floor, 3) for who in ("transformers", "longctx")},
        "time_ratio": round(seconds["longctx"] / seconds["transformers"], 3),
        "activation_mib": {"transformers": round(their_mib), "longctx": round(our_mib)},
        "memory_ratio": round(our_mib / their_mib, 3),
        "losses": {"transformers": timed["losses"][0], "longctx": timed["losses"][1]},
        "nll_error": timed["nll_error"],
    }


def bounds(row: dict[str, Any]) -> Iterator[Bound]:
    """Return a row's bounds."""
    name = row["shape"]
    again = ("--only", name)
    if processor_kind() == "amx":
        floor, their_seconds, our_seconds = (row["cpu_seconds"][who] for who in ("floor", "transformers", "longctx"))
        rest = (our_seconds - floor) / (their_seconds - floor)
        yield Bound("CPU seconds beyond the floor over transformers'", rest, REST_BOUND, name, REST_WHY, again=again)
    else:
        over_floor, limit = row["over_floor"]["longctx"], of_kind(**FLOOR_BOUND[name])
        yield Bound("CPU seconds over the floor", over_floor, limit, name, again=again)
    limit = of_kind(**TIME_BOUND[name])
    yield Bound("CPU seconds over transformers'", row["time_ratio"], limit, name, TIME_WHY, again=again)
    yield Bound("activation memory over transformers'", row["memory_ratio"], MEMORY_BOUND, name)
    error = row["nll_error"]["longctx"] / row["nll_error"]["transformers"]
    yield Bound("error of a token's loss over transformers'", error, NLL_BOUND, name, NLL_WHY)


def print_row(row: dict[str, Any]) -> None:
    """Print one row for the console."""
    seconds, over, mib, losses = row["cpu_seconds"], row["over_floor"], row["activation_mib"], row["losses"]
    print(
        f"{row['shape']:12}{seconds['products']:9.2f}{seconds['attention']:10.2f}{seconds['floor']:7.2f}"
        f"{seconds['transformers']:8.2f}{over['transformers']:6.2f}{seconds['longctx']:7.2f}{over['longctx']:6.2f}"
        f"{row['time_ratio']:8.3f}{mib['transformers']:8}{mib['longctx']:6}{row['memory_ratio']:8.3f}"
        f"   {losses['transformers']:.4f} {losses['longctx']:.4f}",
        flush=True,
    )


def main() -> int:
    """Print and save the table; return 1 if a result is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="shapes to run")
    options = parse(parser, quick="one round")
    print(f"{'CPU s:':12}{'products':>9}{'attention':>10}{'floor':>7}{'theirs':>8}{'×':>6}{'ours':>7}{'×':>6}"
          f"{'ratio':>8}{'MiB':>8}{'ours':>6}{'ratio':>8}   losses")  # fmt: skip
    rows = []
    for name in options.only:
        rows.append(measure(name, 1 if options.quick else 5))
        print_row(rows[-1])
    content = {"tokens": TOKENS, "threads": THREADS, "rows": rows}
    stated = [bound for row in rows for bound in bounds(row)]
    return conclude("decoder", content, stated, options, whole=set(options.only) == set(SHAPES))


if __name__ == "__main__":
    sys.exit(main())

"""A training step's forward and backward, ours beside transformers': CPU seconds and activation memory.

    python -m benchmarks.decoder [--quick] [--only llama mixtral …]

One process, two threads, bfloat16, one row of 2048 tokens, width 512, 8 layers, a vocabulary of 32,000, no
recomputation and no optimiser. transformers runs ``sdpa`` and ``grouped_mm``. The same weights are in both, and their
losses are compared. CPU seconds are the smallest of rounds in which the two take turns in one process; memory, from
fresh processes, is the peak over what was resident with weights and gradients in place. Saved in
``benchmarks/results/decoder.json``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import machine, save
from benchmarks.ranks import with_resident_rise
from longctx.batch import IGNORED_TARGET, Batch
from longctx.documents import PackedDocuments

THREADS, TOKENS = 2, 2048


@dataclass(frozen=True)
class Shape:
    """A model as transformers names it, and what ours may take of its time."""

    model_type: str
    options: dict[str, Any]
    time_bound: float


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
    "llama": Shape("llama", {"intermediate_size": 1376, "head_dim": 64}, 0.90),
    "mixtral": Shape(
        "mixtral",
        {"intermediate_size": 1024, "head_dim": 64, "num_local_experts": 16, "num_experts_per_tok": 2},
        0.90,
    ),
    "qwen3-fine": Shape(
        "qwen3_moe",
        {
            **{"head_dim": 64, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 256},
            "norm_topk_prob": True,
        },
        0.90,
    ),
    "deepseek-v3": Shape(
        "deepseek_v3",
        {
            **{"num_key_value_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64},
            **{"qk_rope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 32, "num_experts_per_tok": 4},
            **{"moe_intermediate_size": 256, "n_shared_experts": 1, "n_group": 4, "topk_group": 2},
            **{"first_k_dense_replace": 1, "intermediate_size": 1376},
        },
        0.60,
    ),
}
MEMORY_BOUND = 0.5


def theirs(shape: Shape) -> tuple[Any, Callable[[], Tensor]]:
    """transformers' model, bfloat16, and its step."""
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
    """Our model with the same weights, by way of a folder that transformers saved."""
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
    """The tokens, [1, T]."""
    return torch.randint(32_000, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def measure_time(name: str, rounds: int) -> dict[str, Any]:
    """CPU seconds of both in one process, and both losses."""
    torch.set_num_threads(THREADS)
    model, their_step = theirs(SHAPES[name])
    _, our_step = ours(SHAPES[name], model)
    losses = [float(step()) for step in (their_step, our_step)]  # the first use of anything is not counted
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds):
        for step, found in zip((their_step, our_step), seconds, strict=True):
            start = time.process_time()
            step()
            found.append(time.process_time() - start)
    return {"cpu_seconds": [round(min(of), 3) for of in seconds], "losses": losses}


def measure_memory(name: str, who: str) -> float:
    """MiB over weights and gradients, of a process that runs one of the two."""
    torch.set_num_threads(THREADS)
    model, step = theirs(SHAPES[name]) if who == "transformers" else ours(SHAPES[name])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return with_resident_rise(step)[1]


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def measure(name: str, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    timed = in_process(measure_time, name, rounds)
    memory = [in_process(measure_memory, name, who) for who in ("transformers", "longctx")]
    (their_s, our_s), (their_mib, our_mib) = timed["cpu_seconds"], memory
    return {
        "shape": name,
        "cpu_seconds": {"transformers": their_s, "longctx": our_s},
        "time_ratio": round(our_s / their_s, 3),
        "time_bound": SHAPES[name].time_bound,
        "activation_mib": {"transformers": round(their_mib), "longctx": round(our_mib)},
        "memory_ratio": round(our_mib / their_mib, 3),
        "memory_bound": MEMORY_BOUND,
        "losses": {"transformers": timed["losses"][0], "longctx": timed["losses"][1]},
    }


def main() -> int:
    """Print the table, save it, and fail when a figure is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round; nothing is saved")
    parser.add_argument("--only", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="shapes to run")
    options = parser.parse_args()
    print(machine())
    print(f"{'':14}{'CPU s, theirs':>15}{'ours':>8}{'ratio':>8}{'MiB, theirs':>14}{'ours':>8}{'ratio':>8}   losses")
    rows, missed = [], []
    for name in options.only:
        row = measure(name, 1 if options.quick else 3)
        rows.append(row)
        seconds, mib, losses = row["cpu_seconds"], row["activation_mib"], row["losses"]
        print(
            f"{name:14}{seconds['transformers']:15.2f}{seconds['longctx']:8.2f}{row['time_ratio']:8.3f}"
            f"{mib['transformers']:14}{mib['longctx']:8}{row['memory_ratio']:8.3f}"
            f"   {losses['transformers']:.4f} {losses['longctx']:.4f}",
            flush=True,
        )
        missed += [f"{name}: {n} {row[f'{n}_ratio']} > {row[f'{n}_bound']}" for n in ("time", "memory")
                   if row[f"{n}_ratio"] > row[f"{n}_bound"]]  # fmt: skip
    if not options.quick and set(options.only) == set(SHAPES):
        print(f"saved {save('decoder', {'tokens': TOKENS, 'threads': THREADS, 'rows': rows})}")
    for text in missed:
        print(f"outside the bounds: {text}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

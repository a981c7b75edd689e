"""Memory and work of models of images beside a decoder's, by ``plan --trace`` and by arithmetic.

    LONGCTX_CUDA_PYTHON=PYTHON python -m benchmarks.image_plan [--save] [NAME …]

ViT-Base on one image of 4096 × 4096 pixels (65,537 tokens with the class token), a decoder of the same width, depth and
length with a vocabulary of 32,000, Image GPT and Swin on as many tokens, each in bfloat16 on eight ranks that share
them. PYTHON has PyTorch's CUDA build; no GPU is needed. KiB per token: what the rank that needs most holds of
activations, kept and passing, over its tokens. Work: attention's FLOPs on the busiest rank over the mean. ViT may need
at most 10 % more memory per token than the decoder, and 1.02 of the mean's work; for images, arithmetic is within the
bounds of ``benchmarks.plan_bytes``. The decoder is not compared with its plan, which
overstates the logits of so few tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.machine import offer_save, save
from benchmarks.plan_bytes import LEAST, MOST, errors, largest
from launcher.config.load_config import load_run_config
from launcher.plan.estimate import RunEstimate, estimate_run
from launcher.plan.hardware import load_hardware
from launcher.plan.planned_world import World
from launcher.plan.seconds import attention_of_stages
from launcher.plan.synthetic_documents import uniform_documents

MOST_MEMORY, MOST_WORK = 1.1, 1.02
"""Bounds for ViT: memory per token over the decoder's, and work of the busiest rank over the mean."""
RANKS, TOKENS = 8, 65_552
"""An image of 65,537 tokens and padding, so that eight ranks can halve their parts."""
KIB = 1024

_BASE = {
    "model.preset": "none",
    "model.hidden_size": 768,
    "model.num_layers": 12,
    "model.num_heads": 12,
    "model.num_kv_heads": 12,
    "model.head_dim": 64,
    "model.ffn_size": 3072,
    "model.activation": "gelu",
    "model.norm": "layernorm",
    "model.position": "learned",
    "model.qkv_bias": "true",
    "model.o_bias": "true",
    "model.ffn_bias": "true",
    "data.seq_len": TOKENS,
    "train.tokens_per_step": TOKENS,
    "train.dtype": "bfloat16",
    "train.keep": "attention",
    "parallel.context": RANKS,
    "zero.stage": 2,
    "validation.sample_tokens": 0,
}
_IMAGE = {"model.causal": "false", "model.vocab_size": 0, "train.objective": "classes", "model.classes": 1000}
MODELS: dict[str, dict[str, Any]] = {
    "decoder": {**_BASE, "model.vocab_size": 32_000, "model.max_positions": TOKENS},
    "vit": {
        **_BASE,
        **_IMAGE,
        "model.max_positions": 65_537,
        "model.image.height": 4096,
        "model.image.width": 4096,
        "model.image.patch": 16,
        "model.image.class_token": "true",
    },
    "igpt": {
        **_BASE,
        "model.vocab_size": 513,
        "model.output_vocab_size": 512,
        "model.tie_embeddings": "false",
        "model.max_positions": 65_536,
        "model.image.height": 256,
        "model.image.width": 256,
    },
    "swin": {
        **_BASE,
        **_IMAGE,
        "model.hidden_size": 128,
        "model.num_heads": 4,
        "model.num_kv_heads": 4,
        "model.head_dim": 32,
        "model.ffn_size": 512,
        "model.num_layers": 24,
        "model.position": "none",
        "model.embedding_norm": "true",
        "model.class_pool": "mean",
        "model.layers": "image_window shifted_window",
        "model.image.height": 1792,
        "model.image.width": 1792,
        "model.image.patch": 4,
        "model.image.window": 7,
        "model.image.depths": "2 2 18 2",
        "data.seq_len": 448 * 448,
        "train.tokens_per_step": 448 * 448,
    },
}
"""The decoder, ViT-Base, Image GPT with ViT-Base's sizes, and Swin-Base on 200,704 patches."""
_CHUNKS = {"train.chunk_tokens": 2048, "train.head_groups": 4}
WAYS: dict[str, dict[str, Any]] = {"attention": {}, "chunks, host": {**_CHUNKS, "train.store": "host"}}


def argv(model: str, way: str) -> list[str]:
    """Return the arguments for ``plan``."""
    settings = {**MODELS[model], **WAYS[way]}
    return [word for key, value in settings.items() for word in (f"--{key}", *str(value).split())]


def trace(model: str, way: str) -> dict[str, int]:
    """Return the bytes of the rank that needs most, by ``plan --trace``."""
    python = os.environ.get("LONGCTX_CUDA_PYTHON", sys.executable)
    command = [python, "-m", "launcher", "plan", "--trace", "--json", "--ranks", str(RANKS), *argv(model, way)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    ranks: list[dict[str, Any]] = [rank["bytes"] for rank in json.loads(done.stdout)["ranks"]]
    most = max(ranks, key=lambda one: one["peak"])
    return {name: most[name] for name in ("kept", "kept_on_host", "passing", "peak")}


def planned(model: str, way: str) -> RunEstimate:
    """Return the bytes and seconds by arithmetic."""
    return estimate_run(load_run_config(argv(model, way)), world(), load_hardware("h100"))


def world() -> World:
    """Return the ranks, on one machine."""
    return World(ranks=RANKS, ranks_per_node=RANKS)


def work_over_mean(run: RunEstimate) -> float:
    """Return attention's FLOPs on the busiest rank over the mean."""
    documents = uniform_documents(run.config)
    works = [sum(attention_of_stages(run.config, world(), rank, documents).flops.values()) for rank in range(RANKS)]
    return max(works) * RANKS / sum(works)


def row(model: str, way: str) -> dict[str, Any]:
    """Trace and plan one run."""
    traced, run = trace(model, way), planned(model, way)
    of_bytes = largest(run)
    tokens = run.config.data.seq_len / RANKS
    return {
        "model": model,
        "way": way,
        **traced,
        "planned": {name: getattr(of_bytes, name) for name in traced},
        "kib_per_token": round((traced["kept"] + traced["passing"]) / tokens / KIB, 2),
        "work_over_mean": round(work_over_mean(run), 4),
        "errors": [round(error, 4) for error in errors(run, traced)],
    }


def misses(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Describe the rows outside their bounds."""
    found, decoder = [], {one["way"]: one["kib_per_token"] for one in rows if one["model"] == "decoder"}
    for one in rows:
        name = f"{one['model']}, {one['way']}"
        if one["model"] != "decoder" and not all(LEAST <= error <= MOST for error in one["errors"]):
            found.append(f"{name}: arithmetic is off by {one['errors']}")
        if one["model"] != "vit":
            continue
        if one["way"] in decoder and one["kib_per_token"] > MOST_MEMORY * decoder[one["way"]]:
            found.append(f"{name}: {one['kib_per_token']} KiB per token, the decoder {decoder[one['way']]}")
        if one["work_over_mean"] > MOST_WORK:
            found.append(f"{name}: the busiest rank has {one['work_over_mean']} of the mean work")
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Trace and compare; return 1 if a row is outside its bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"these models alone: {', '.join(MODELS)}")
    offer_save(parser)
    options = parser.parse_args(words)
    rows = []
    print("model | way | KiB per token | host | error of peak | of activations | work over mean")
    for model in options.names or MODELS:
        for way in WAYS:
            found = row(model, way)
            rows.append(found)
            on_host = found["kept_on_host"] * RANKS / int(MODELS[model]["data.seq_len"]) / KIB
            of_peak, of_activations = found["errors"]
            cells = [model, way, f"{found['kib_per_token']:.1f}", f"{on_host:.1f}", f"{of_peak:+.1%}"]
            print(" | ".join([*cells, f"{of_activations:+.1%}", f"{found['work_over_mean']:.4f}"]), flush=True)
    if options.save:
        save("image_plan", {"command": "python -m benchmarks.image_plan", "ranks": RANKS, "rows": rows})
    missed = misses(rows)
    for line in missed:
        print(line)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

"""Computed tables, without measurements: ``longctx plan`` for recipes, presets and layers by chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.config.load_config import load_run_config
from launcher.plan.estimate import RunEstimate, estimate_run
from launcher.plan.hardware import load_hardware
from launcher.plan.memory_estimate import GIB, gib
from launcher.plan.planned_world import World
from launcher.recipes.find import find_config
from tests.launcher.runs import recipe_flags

RECIPE_RANKS = {
    "dense-1b": 8,
    "moe-fine-7b-a1b": 8,
    "llama-3.1-8b-128k": 8,
    "extend-yarn": 16,
    "mistral-7b-32k": 8,
    "qwen3-8b-256k-yarn": 8,
    "qwen3-30b-a3b-128k": 16,
    "sft-qwen3-8b-128k": 8,
    "sft-llama-3.1-8b-256k": 8,
    "lora-llama-3.1-8b-256k": 1,
    "lora-gpt-oss-20b-512k": 1,
    "dpo-qwen3-8b-64k": 8,
    "transformer-base": 1,
}
"""Number of GPUs for which each recipe is written."""
KIB = 2**10
TOKENS = 131_072
"""Tokens per rank in the tables of bytes per token."""
KEPT = (
    ("llama-3.1-8b", "all"),
    ("llama-3.1-8b", "attention"),
    ("llama-3.1-8b", "inputs"),
    ("qwen3-30b-a3b", "attention"),
    ("qwen3-30b-a3b", "inputs"),
    ("deepseek-v3", "attention"),
    ("deepseek-v3", "inputs"),
)
"""Presets and values of ``train.keep``."""
_HOST = {"train.keep": "attention", "train.store": "host"}
_TUNING = {"parallel.tokens_per_rank": 0, "zero.offload": "cpu", **_HOST}
CHUNKED: dict[str, tuple[int, dict[str, Any]]] = {
    "llama-3.1-8b, all tokens at once": (8, {"zero.stage": 2, **_HOST}),
    "llama-3.1-8b": (8, {"zero.stage": 3, "train.chunk_tokens": 4096, "train.head_groups": 8, **_HOST}),
    "qwen3.5-9b, a hybrid": (8, {"zero.stage": 3, "train.chunk_tokens": 4096, "train.head_groups": 16, **_HOST}),
    "sft-qwen3-8b-128k": (1, {"zero.stage": 1, "train.chunk_tokens": 16384, "train.head_groups": 1, **_TUNING}),
    "sft-qwen3-8b-128k, smaller chunks": (
        1,
        {"zero.stage": 3, "train.chunk_tokens": 8192, "train.head_groups": 4, **_TUNING},
    ),
}
"""Ranks and settings for a preset's or recipe's rows by chunks."""


def recipe_table() -> str:
    """Return the recipes' tokens, memory and hours. Models that they start from have their published config.json."""
    lines = ["| recipe | H100s | tokens | peak of a GPU | s a step | hours |", "|---|--:|--:|--:|--:|--:|"]
    for name, ranks in RECIPE_RANKS.items():
        run = _estimate(recipe_flags(find_config(name)), ranks)
        train = run.config.train
        tokens = f"{train.steps * train.tokens_per_step / 1e9:.1f}B"
        lines.append(
            f"| `{name}` | {ranks} | {tokens} | {gib(run.peak_bytes)} | {run.seconds.total:.3g} | {run.run_hours:.2g} |"
        )
    return "\n".join(lines)


def kept_table() -> str:
    """Return the memory that presets keep until backward, in KiB per token, on one rank, by ``train.keep`` and
    ``train.store``.
    """
    columns = ("model", "`keep`", '`store = "device"`: kept', "passing", '`"host"`: kept on the device', "on the host")
    lines = [f"| {' | '.join(columns)} | passing |", "|---|---|--:|--:|--:|--:|--:|"]
    for preset, keep in KEPT:
        cells = []
        for store in ("device", "host"):
            rank = _estimate(_preset_flags(preset, 1, {"train.keep": keep, "train.store": store}), 1).ranks[0].bytes
            bytes_held = [rank.kept, rank.kept_on_host, rank.passing]
            if store == "device":
                bytes_held.remove(rank.kept_on_host)
            cells += [f"{held / TOKENS / KIB:,.0f}" for held in bytes_held]
        lines.append(f"| {preset} | {keep} | {' | '.join(cells)} |")
    return "\n".join(lines)


def chunks_table() -> str:
    """Return memory by chunks: KiB per token on the device, kept and passing, and GiB per rank."""
    lines = [
        "| model | ranks | ZeRO | token chunk | head groups | KiB per token, kept + passing | peak, GiB | host, GiB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, (ranks, settings) in CHUNKED.items():
        run = _estimate(_preset_flags(name.split(",")[0], ranks, settings), ranks)
        rank, train = run.ranks[0].bytes, run.config.train
        per_token = (rank.kept + rank.passing) / TOKENS / KIB
        chunks = f"{train.chunk_tokens:,}" if train.chunk_tokens else "–"
        lines.append(
            f"| {name} | {ranks} | {run.config.zero.stage} | {chunks} | {train.head_groups} | {per_token:.0f} "
            f"| {rank.peak / GIB:.1f} | {run.host_bytes / GIB:.1f} |"
        )
    return "\n".join(lines)


def _preset_flags(name: str, ranks: int, settings: Mapping[str, Any]) -> list[str]:
    """Return flags for one row of ``TOKENS`` tokens per rank, for a preset or a recipe."""
    if name in RECIPE_RANKS:
        flags = recipe_flags(find_config(name))
    else:
        flags = ["--config", "quickstart", "--model.preset", name, "--parallel.expert", "1"]
    values = {
        "parallel.context": ranks,
        "data.seq_len": ranks * TOKENS,
        "train.tokens_per_step": ranks * TOKENS,
        **settings,
    }
    return [*flags, *(word for key, value in values.items() for word in (f"--{key}", str(value)))]


def _estimate(flags: list[str], ranks: int) -> RunEstimate:
    world = World(ranks=ranks, ranks_per_node=min(ranks, 8))
    return estimate_run(load_run_config(flags), world, load_hardware("h100"))

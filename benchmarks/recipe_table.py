"""The table of docs/recipes.md: what ``longctx plan`` says of each recipe for GPUs, with one document a row."""

from __future__ import annotations

from launcher.config.load_config import load_run_config
from launcher.plan.estimate import estimate_run
from launcher.plan.hardware import load_hardware
from launcher.plan.memory_estimate import gib
from launcher.plan.planned_world import World
from launcher.recipes.find import find_config
from tests.launcher.runs import recipe_flags

RANKS = {
    "dense-1b": 8,
    "moe-fine-7b-a1b": 8,
    "llama-3.1-8b-128k": 8,
    "extend-yarn": 16,
    "mistral-7b-32k": 8,
    "qwen3-8b-256k-yarn": 8,
    "qwen3-30b-a3b-128k": 16,
    "sft-qwen3-8b-128k": 8,
    "sft-llama-3.1-8b-256k": 8,
    "transformer-base": 1,
}
"""GPUs that each is written for."""


def recipe_table() -> str:
    """Return the table as Markdown. Models that a recipe starts from have their published ``config.json``."""
    lines = ["| recipe | H100s | tokens | peak of a GPU | s a step | hours |", "|---|--:|--:|--:|--:|--:|"]
    for name, ranks in RANKS.items():
        config = load_run_config(recipe_flags(find_config(name)))
        world = World(ranks=ranks, ranks_per_node=min(ranks, 8))
        run = estimate_run(config, world, load_hardware("h100"))
        tokens = f"{config.train.steps * config.train.tokens_per_step / 1e9:.1f}B"
        time = f"{run.seconds.total:.3g} | {run.run_hours:.2g}"
        lines.append(f"| `{name}` | {ranks} | {tokens} | {gib(run.peak_bytes)} | {time} |")
    return "\n".join(lines)

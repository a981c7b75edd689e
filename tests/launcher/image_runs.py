"""Configs of runs with tiny models of images."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from launcher.config.config_sections import RunConfig
from launcher.config.load_config import config_from_values
from longctx.config import ModelConfig


def image_run(model: ModelConfig, rows_of: int = 4, **changed: Any) -> RunConfig:
    """A run whose rows have room for ``rows_of`` images; ``changed`` keys have two underscores for the dot."""
    seq_len = rows_of * model.image.num_tokens
    keys: dict[str, Any] = {
        "data.seq_len": seq_len,
        "train.tokens_per_step": changed.get("data__seq_len", seq_len),
        "train.objective": "causal" if model.predicts_tokens else "classes",
        "train.class_weight": 0.5 if model.predicts_tokens and model.classes else 0.0,
        "train.dtype": "float32",
        "train.lr": 1e-3,
        "run.hostfile": "none",
        "validation.rows": 0,
    }
    keys |= {name.replace("__", "."): value for name, value in changed.items()}
    values: dict[str, Any] = {"model": asdict(model)}
    for key, value in keys.items():
        section, name = key.split(".")
        values.setdefault(section, {})[name] = value
    return config_from_values(values)

"""Stages of a hierarchical image model: each has half the resolution of the one before, and twice its width."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

from longctx.architecture.fields import ModelFields

F = TypeVar("F", bound=ModelFields)


def stage_configs(config: F) -> tuple[F, ...]:
    """Return each stage as its own model with one stage; empty if the model has none (``model.image.depths``)."""
    return _stages(config)


@lru_cache(maxsize=32)
def _stages(config: Any) -> tuple[Any, ...]:
    return tuple(_stage(config, number) for number in range(len(config.image.depths)))


@lru_cache(maxsize=64)
def _stage(config: F, number: int) -> F:
    # A stage's tokens are patches of the image with twice the side, merged from four.
    factor, depth = 2**number, config.image.depths[number]
    return replace(
        config,
        hidden_size=factor * config.hidden_size,
        num_heads=factor * config.num_heads,
        num_kv_heads=factor * config.num_kv_heads,
        ffn_size=factor * config.ffn_size,
        num_layers=depth,
        layers=config.layers[:depth],
        image=replace(config.image, patch=factor * config.image.patch, depths=(depth,)),
    )

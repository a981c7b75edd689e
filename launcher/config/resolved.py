"""``ResolvedConfig``: a run's settings without any ``auto``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

import torch

from launcher.config.config_sections import ParallelSection, RunConfig, TrainSection, ZeroSection

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class ResolvedTrain(TrainSection):
    """Section ``[train]`` with all keys resolved."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    products: Literal["native", "float32"] = "float32"
    compile: Literal["on", "off"] = "off"
    chunk_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class ResolvedParallel(ParallelSection):
    """Section ``[parallel]`` with all keys resolved; ``context`` is the number of ranks that share a micro-batch."""

    expert_tile_tokens: int = 0
    layout: str = "contiguous"


@dataclass(frozen=True, kw_only=True)
class ResolvedZero(ZeroSection):
    """Section ``[zero]`` with all keys resolved."""

    stage: int = 1


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(RunConfig):
    """Result of ``resolve``: a ``RunConfig`` with all keys resolved."""

    train: ResolvedTrain = field(default_factory=ResolvedTrain)
    parallel: ResolvedParallel = field(default_factory=ResolvedParallel)
    zero: ResolvedZero = field(default_factory=ResolvedZero)

    @classmethod
    def of(cls, config: RunConfig) -> ResolvedConfig:
        """Return the same values with resolved types. Raise AssertionError if a key is still ``auto``."""
        train, parallel, zero = config.train, config.parallel, config.zero
        # Subclasses only narrow the types; dataclasses do not validate them.
        resolved_values = (train.dtype, train.products, train.compile, train.chunk_tokens, zero.stage)
        assert AUTO not in (*resolved_values, parallel.layout, parallel.expert_tile_tokens)
        sections = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        sections["train"] = ResolvedTrain(**vars(train))
        sections["parallel"] = ResolvedParallel(**vars(parallel))
        sections["zero"] = ResolvedZero(**vars(zero))
        return cls(**sections)

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return getattr(torch, self.train.dtype)

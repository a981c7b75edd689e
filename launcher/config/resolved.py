"""``ResolvedConfig``: a run's settings of which none is left open."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

import torch

from launcher.config.sections import ParallelSection, RunConfig, TrainSection, ZeroSection

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class ResolvedTrain(TrainSection):
    """``[train]``."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    products: Literal["native", "float32"] = "float32"
    compile: Literal["on", "off"] = "off"
    chunk_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class ResolvedParallel(ParallelSection):
    """``[parallel]``; ``context`` are the ranks that share a micro-batch."""

    expert_tile_tokens: int = 0
    layout: str = "contiguous"


@dataclass(frozen=True, kw_only=True)
class ResolvedZero(ZeroSection):
    """``[zero]``."""

    stage: int = 1


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(RunConfig):
    """What ``resolve`` makes of a ``RunConfig``."""

    train: ResolvedTrain = field(default_factory=ResolvedTrain)
    parallel: ResolvedParallel = field(default_factory=ResolvedParallel)
    zero: ResolvedZero = field(default_factory=ResolvedZero)

    @classmethod
    def of(cls, config: RunConfig) -> ResolvedConfig:
        """The same values under types that say so; AssertionError if one of them is left open."""
        train, parallel, zero = config.train, config.parallel, config.zero
        settled = (train.dtype, train.products, train.compile, train.chunk_tokens, zero.stage)
        assert AUTO not in (*settled, parallel.layout, parallel.expert_tile_tokens)
        sections = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        sections["train"] = ResolvedTrain(**vars(train))
        sections["parallel"] = ResolvedParallel(**vars(parallel))
        sections["zero"] = ResolvedZero(**vars(zero))
        return cls(**sections)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the run computes in."""
        return getattr(torch, self.train.dtype)

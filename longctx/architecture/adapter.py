"""``AdapterShape``: low-rank updates that are trained instead of a model's weights. Imports no tensor library."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from difflib import get_close_matches

from longctx.architecture.types import check_types
from longctx.errors import ConfigError
from longctx.untrusted.strict_json import shown

_MOST_RANK = 1 << 16
QUANTIZED = ("none", "fp8", "nf4")
"""Values for ``quantize_base``."""


# LoRA (Hu et al., arXiv 2106.09685): a projection y = W·x becomes W·x + s·B·(A·x), with a frozen W [O, I], and A [r, I]
# and B [O, r] trained. B starts at 0, so the first step computes the base model's values.
@dataclass(frozen=True, kw_only=True)
class AdapterShape:
    """Low-rank adapters (LoRA, arXiv 2106.09685) on a model whose own weights are frozen."""

    rank: int = 0
    """Rank r of each update; 0 trains the model's own weights."""
    alpha: float = 16.0
    """Scale of the updates: each is multiplied by alpha / rank."""
    rank_stabilized: bool = False
    """Multiply by alpha / √rank instead, so that a larger rank does not learn more slowly (arXiv 2312.03732)."""
    targets: tuple[str, ...] = ()
    """Projections with an adapter, by the end of their names: q_proj, mlp.down_proj, experts.gate_up_proj; empty for
    all in the model's blocks."""
    quantize_base: str = "none"
    """How the frozen matrices in the blocks are stored: none (in train.dtype), fp8 (8 bits, float8_e4m3fn in blocks of
    128 × 128) or nf4 (4.5 bits, QLoRA's codes in blocks of 64); products are in train.dtype."""

    def __post_init__(self) -> None:
        check_types(self, "model.adapter")
        if not 0 <= self.rank <= _MOST_RANK:
            raise ConfigError(f"model.adapter.rank={self.rank} must be between 0 and {_MOST_RANK:,}. Try 16.")
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"model.adapter.alpha={self.alpha} must be a positive number. Try 16.")
        if self.quantize_base not in QUANTIZED:
            nearest = get_close_matches(self.quantize_base.lower(), QUANTIZED, n=1, cutoff=0.0)
            raise ConfigError(
                f"model.adapter.quantize_base={shown(self.quantize_base)} is unknown. Try {nearest[0]}, one of "
                f"{list(QUANTIZED)}."
            )
        if not self.rank and self.is_quantized:
            raise ConfigError(
                f"model.adapter.quantize_base={self.quantize_base} is for frozen weights, and with "
                "model.adapter.rank=0 all weights are trained. Try --model.adapter.rank 16, or "
                "--model.adapter.quantize_base none."
            )
        if not self.rank and self.targets:
            raise ConfigError(
                f"model.adapter.targets={list(self.targets)} has no effect with model.adapter.rank=0. Try "
                "--model.adapter.rank 16."
            )

    def check_width(self, hidden_size: int) -> None:
        """Raise ConfigError if A and B would have as many values as a square weight that they replace."""
        if self.rank > hidden_size // 2:
            raise ConfigError(
                f"model.adapter.rank={self.rank} is more than half the model's width (model.hidden_size="
                f"{hidden_size}): A and B would be as large as a full weight.\nTry --model.adapter.rank "
                f"{max(1, hidden_size // 8)}, or 0 to train the weights themselves."
            )

    @property
    def is_used(self) -> bool:
        """True if adapters are trained, and the model's own weights are frozen."""
        return self.rank > 0

    @property
    def is_quantized(self) -> bool:
        """True if the frozen matrices are stored in 4 or 8 bits."""
        return self.quantize_base != "none"

    def without_quantization(self) -> AdapterShape:
        """Return the same adapters on a base in full precision, which has the shapes of all weights."""
        return replace(self, quantize_base="none")

    @property
    def scale(self) -> float:
        """Factor on each update."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


FACTORS = ("lora_A", "lora_B")
"""Ends of the names of an adapter's parameters, as in PEFT."""


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return name.endswith(FACTORS)


def merged_name(name: str) -> str:
    """Return the name of the weight that an adapter's A or B belongs to."""
    module, _, factor = name.rpartition(".")
    # Experts are one module's parameters, each with its own adapter: gate_up_proj_lora_A.
    matrix = factor.removesuffix(factor[-len(FACTORS[0]) :]).removesuffix("_")
    return f"{module}.{matrix or 'weight'}"


def factor_names(weight: str) -> tuple[str, str]:
    """Return the names of A and B for a weight: the inverse of ``merged_name``."""
    module, _, matrix = weight.rpartition(".")
    prefix = "" if matrix == "weight" else f"{matrix}_"
    a, b = (f"{module}.{prefix}{factor}" for factor in FACTORS)
    return a, b

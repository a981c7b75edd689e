"""``ModelConfig``: everything that defines a decoder, and its presets. Imports no tensor library."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from longctx.errors import ConfigError

_SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_positions")
_TRAINING_FIELDS = {"init_std", "balance_loss_weight", "max_positions"}
_EXPERT_FIELDS = {"experts_per_token", "expert_ffn_size", "shared_ffn_size", "normalize_gates"}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder: RMSNorm pre-norm, RoPE, grouped-query attention, SwiGLU, dense or mixture-of-experts FFN."""

    vocab_size: int = 4096
    """Entries of the embedding table; at least the tokenizer's size."""
    hidden_size: int = 128
    """Model width M."""
    num_layers: int = 4
    """Decoder blocks."""
    num_heads: int = 2
    """Query heads H."""
    num_kv_heads: int = 1
    """Key/value heads K; divides num_heads (K = H is multi-head, K = 1 multi-query attention)."""
    head_dim: int = 64
    """Width D of one head."""
    qkv_bias: bool = True
    """Whether the query, key and value projections have a bias."""
    rope_theta: float = 10_000.0
    """Base of the rotary position frequencies."""
    max_positions: int = 4096
    """Longest document piece the model is meant for, in tokens; written to exported configs."""
    norm_eps: float = 1e-6
    """Epsilon inside every RMSNorm."""
    ffn_size: int = 384
    """Width F of the dense SwiGLU; read only when num_experts is 0."""
    num_experts: int = 0
    """Routed experts E a layer; 0 makes every FFN dense."""
    experts_per_token: int = 2
    """Routed experts that each token visits (top-k)."""
    expert_ffn_size: int = 128
    """Width F of one routed expert."""
    shared_ffn_size: int = 0
    """Width of the gated shared expert that every token visits; 0 for none."""
    normalize_gates: bool = True
    """Whether the chosen experts' gates are rescaled to sum to one."""
    balance_loss_weight: float = 0.001
    """Weight of the load-balancing loss; each packed document is balanced as a sequence of its own."""
    tie_embeddings: bool = True
    """Whether the output head is the embedding table."""
    init_std: float = 0.02
    """Standard deviation of initial weights."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)} must be at least 1.")
        for name in ("rope_theta", "norm_eps", "init_std"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"model.{name}={getattr(self, name)} must be a positive number.")
        self._check_heads()
        self._check_ffn()

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ConfigError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}.\n"
                f"Try one of {divisors}."
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model.head_dim={self.head_dim} must be even: RoPE turns pairs. Try {self.head_dim + 1}."
            )

    def _check_ffn(self) -> None:
        for name in ("num_experts", "shared_ffn_size", "balance_loss_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"model.{name}={getattr(self, name)} must not be negative; 0 means none.")
        if self.num_experts:
            if not 1 <= self.experts_per_token <= self.num_experts:
                raise ConfigError(
                    f"model.experts_per_token={self.experts_per_token} must lie between 1 and "
                    f"model.num_experts={self.num_experts}."
                )
            if self.expert_ffn_size < 1:
                raise ConfigError(f"model.expert_ffn_size={self.expert_ffn_size} must be at least 1.")
        elif self.ffn_size < 1:
            raise ConfigError(f"model.ffn_size={self.ffn_size} must be at least 1 in a dense model.")

    def differences(self, other: ModelConfig) -> dict[str, tuple[Any, Any]]:
        """Fields in which the two are different functions of their weights: name -> (this one's, the other's).

        How weights start, what a loss weighs and sizes that a dense (or expert) model does not read make no difference.
        """
        idle = {"ffn_size"} if self.num_experts else _EXPERT_FIELDS
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(ModelConfig)}
        return {
            name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in idle | _TRAINING_FIELDS
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """A config from plain values, strict: an unknown key is an error."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ConfigError(f"unknown model keys {unknown}; known: {sorted(known)}.")
        return cls(**values)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        """The config a Hugging Face ``config.json`` describes; ConfigError where this decoder cannot be that model."""
        from longctx.conversion import families

        return families.config_from_hf(config)

    def to_hf(self) -> dict[str, Any]:
        """A Hugging Face ``config.json`` for this model; ConfigError where no supported family has its shape."""
        from longctx.conversion import families

        return families.config_to_hf(self)


PRESETS: dict[str, ModelConfig] = {
    "quickstart": ModelConfig(
        num_layers=2, num_experts=8, expert_ffn_size=128, shared_ffn_size=256, balance_loss_weight=0.01
    ),
    "quickstart-dense": ModelConfig(num_layers=2),
}
"""Named shapes for ``model.preset``."""

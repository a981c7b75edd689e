"""``ModelConfig``: everything that defines a decoder. Imports no tensor library."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

from longctx import families
from longctx.architecture.fields import ModelFields, names_of_role
from longctx.architecture.rope import Rope
from longctx.architecture.rules import check_model
from longctx.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelFields):
    """Shape of a decoder, checked: ``longctx/architecture/fields.py`` has the fields.

    Where a number may be left out, 0 means that there is none (or the usual one). The defaults are a small Qwen2:
    RMSNorm before each part, rotary positions, grouped-query attention, SwiGLU.
    """

    def __post_init__(self) -> None:
        check_model(self)

    def differences(self, other: ModelConfig) -> dict[str, tuple[Any, Any]]:
        """Fields in which the two are different functions of their weights: name -> (this one's, the other's).

        How weights start, what a loss weighs and sizes that a dense (or expert) model does not read make no difference.
        """
        idle = names_of_role("training") | names_of_role("length")
        # A model without experts does not read their fields, and one of experts alone not the dense FFN's width.
        if not self.num_experts:
            idle |= names_of_role("experts")
        elif not self.dense_layers:
            idle |= {"ffn_size"}
        differing: dict[str, tuple[Any, Any]] = {}
        for f in fields(ModelConfig):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if mine != theirs and f.name not in idle:
                differing[f.name] = mine, theirs
        return differing

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """A config from plain values, lists for tuples as JSON has them, strict: an unknown key is an error."""
        values = dict(values)
        if isinstance(values.get("rope"), dict):
            values["rope"] = _from_plain(Rope, values["rope"], "model.rope")
        return _from_plain(cls, values, "model")

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> Self:
        """The config a Hugging Face ``config.json`` describes; ConfigError where this decoder cannot be that model."""
        return cls(**families.config_from_hf(config))

    def to_hf(self) -> dict[str, Any]:
        """A Hugging Face ``config.json`` for this model; ConfigError where no supported family has its shape."""
        return families.config_to_hf(self)


def _from_plain(kind: type[T], values: dict[str, Any], where: str) -> T:
    """A dataclass from plain values; ConfigError for a key that it does not have."""
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"unknown {where} keys {unknown}; known: {sorted(known)}.")
    # JSON and TOML have no tuples, and a frozen config must hash.
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return kind(**(values | lists))

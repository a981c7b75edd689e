"""Quantization scheme from ``quantization_config`` in config.json: the weights' storage format. Imports no torch.

Weights are read as the bfloat16 values that the scheme's reference code computes, and trained and exported as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from longctx.errors import ConfigError
from longctx.untrusted.strict_json import shown

KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class Quantization:
    """Storage scheme for a folder's quantised weights."""

    kind: Literal["fp8", "mxfp4"]
    """fp8: E4M3 with scales per block, row or tensor. mxfp4: E2M1 in blocks of 32 with a power of two each."""
    scales: str = ""
    """Suffix that a scale's name adds to its weight's (fp8)."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None for a scale per row or tensor."""

    def __str__(self) -> str:
        """Return the name for an import's log."""
        if self.kind == "mxfp4":
            return "MXFP4"
        if self.block:
            return f"FP8, one scale per {self.block[0]} x {self.block[1]} block"
        return "FP8, one scale per tensor or row"


def quantization_of(hf: Mapping[str, Any]) -> Quantization | None:
    """Return a config.json's quantization scheme, if it names one. Raise ConfigError if it is not supported."""
    # compressed-tensors files from before 2025 have the second key.
    found = [hf[key] for key in KEYS if hf.get(key) is not None]
    if not found:
        return None
    values = found[0]
    if not isinstance(values, Mapping):
        raise ConfigError(f"quantization_config={shown(values)} in config.json is not an object.")
    method = values.get("quant_method")
    if method == "mxfp4":
        return Quantization("mxfp4")
    if method == "fp8":
        return Quantization("fp8", "_scale_inv", _block(values.get("weight_block_size")))
    if method == "compressed-tensors":
        return _compressed(values)
    raise ConfigError(
        f"quant_method={shown(method)} (quantization_config in config.json) is not supported; supported: fp8, float8 "
        "compressed-tensors and mxfp4.\nUse the folder with the unquantised weights."
    )


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise ConfigError(
            f"weight_block_size={shown(value)} in config.json must be two block sizes, for rows and columns."
        )
    return value[0], value[1]


def _compressed(values: Mapping[str, Any]) -> Quantization:
    """Return the scheme that all layer groups share."""
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(f"config_groups={shown(groups)} of compressed-tensors in config.json contains no group.")
    schemes = set()
    for group in groups.values():
        weights = {}
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping):
            weights = group["weights"]
        # Activations may be quantised at inference; weights do not depend on it.
        is_float8 = weights.get("type") == "float" and weights.get("num_bits") == 8
        if not is_float8 or weights.get("strategy") not in ("tensor", "channel", "block"):
            raise ConfigError(
                f"compressed-tensors with weights {shown(weights)} are not supported; supported: 8-bit float per "
                "tensor, channel or block.\nUse the folder with the unquantised weights."
            )
        # Scales per tensor and per row differ in shape, so they need no flag.
        block = None
        if weights["strategy"] == "block":
            block = _block(weights.get("block_structure"))
        schemes.add(block)
    if len(schemes) > 1:
        raise ConfigError(
            f"compressed-tensors with different blocks per group are not supported: {shown(dict(groups))}."
        )
    return Quantization("fp8", "_scale", schemes.pop())

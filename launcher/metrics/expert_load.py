"""Expert load (tokens routed to each expert of a layer): statistics and on-disk format.

A small model's records contain all counts in every step. For a large model that is too much: 48 layers with 128 experts
have 6,144 counts per step, half a gigabyte in 10,000 steps. Its records contain per-layer statistics and idle experts
in every step, but all counts only in some.

Axes: L expert layers, E experts.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launcher.metrics.record import METRICS_FILE
from longctx.config import ModelConfig
from longctx.errors import DataError


def expert_layers(model: ModelConfig) -> list[int]:
    """Return the layers with experts in order, one per row in every tensor with an L axis.

    Layers after the last decoder layer belong to multi-token prediction.
    """
    return [layer for layer in range(model.depth) if model.has_experts(layer)]


def max_over_mean(counts: Sequence[float]) -> float:
    """Return the busiest expert's load over the mean, ``max / (sum / E)``: 1.0 if balanced, E / top-k at worst.

    If experts are spread over devices, the slowest device takes this many times longer. NaN if no token was routed.
    """
    total = sum(counts)
    if not total:
        return math.nan
    return max(counts) * len(counts) / total


def max_violation(counts: Sequence[float]) -> float:
    """Return the busiest expert's excess, ``max / mean − 1``: 0 if balanced (MaxVio in arXiv 2408.15664)."""
    return max_over_mean(counts) - 1


def mean_violation(counts: Sequence[float]) -> float:
    """Return the mean deviation from the mean load, ``Σ |counts[e] − mean| / (E · mean)``: 0 if balanced.

    Half this value is the share of tokens that would have to move to other experts. NaN if no token was routed.
    """
    total = sum(counts)
    if not total:
        return math.nan
    return sum(abs(count - total / len(counts)) for count in counts) / total


def idle_share(counts: Sequence[float]) -> float:
    """Return the share of experts without a token: ``#{e: counts[e] = 0} / E``; NaN without experts."""
    if not counts:
        return math.nan
    return sum(1 for count in counts if count == 0) / len(counts)


def load_entropy(counts: Sequence[float]) -> float:
    """Return the load entropy ``−Σ p·ln p`` in nats, with ``p = counts / sum``: ln E if balanced, ln top-k at worst."""
    total = sum(counts)
    if not total:
        return math.nan
    # Adding 0.0 turns −0.0, from a load on one expert, into 0.0.
    return -sum(p * math.log(p) for p in (count / total for count in counts) if p > 0) + 0.0


def layer_numbers(record: Mapping[str, Any]) -> list[int]:
    """Return the layer for each ``expert_load`` row: ``expert_layers``, or row numbers if the record lacks it."""
    return record.get("expert_layers") or list(range(len(record.get("expert_load") or [])))


DEAD_AFTER_STEPS = 50
"""Consecutive steps without a token after which an expert counts as dead."""


def expert_name(layer: int, expert: int) -> str:
    """Return the expert's name as in its weights: ``model.layers.3.mlp.experts.7``."""
    return f"model.layers.{layer}.mlp.experts.{expert}"


def worst_max_over_mean(expert_load: Sequence[Sequence[float]]) -> float | None:
    """Return ``max_over_mean`` for the least balanced layer; None for a dense model or if no token was routed."""
    ratios = [max_over_mean(layer) for layer in expert_load if sum(layer)]
    return max(ratios, default=None)


WHOLE_COUNTS = 512
"""Maximum counts per step (layers times experts) for which every record contains all counts."""
MEAN_COUNTS = 96
"""Mean counts written per step for a larger model."""
PRECISION = 5
"""Significant digits in a larger model's statistics."""

LAYER_STATISTIC_KEYS = (
    "expert_max_violation",
    "expert_mean_violation",
    "expert_dropped_share",
    "router_entropy",
    "router_logit_rms",
)
"""Train record keys with one number per expert layer, in ``expert_layers`` order."""


def steps_between_loads(counts: int) -> int:
    """Return the steps between two records with all counts; ``counts`` is layers times experts."""
    if counts <= WHOLE_COUNTS:
        return 1
    # Larger models write less often: the mean count per step stays constant.
    return math.ceil(counts / MEAN_COUNTS)


def compact_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record to write; a large model's record has rounded statistics and, in most steps, no counts.

    All counts are written in steps divisible by ``steps_between_loads`` and in steps 1, 2, 4, 8, …
    """
    loads = record.get("expert_load") or []
    if not loads:
        return dict(record)
    every = steps_between_loads(len(loads) * len(loads[0]))
    short = dict(record)
    if every == 1:
        return short
    for key in LAYER_STATISTIC_KEYS:
        if short.get(key):
            short[key] = [float(f"{value:.{PRECISION}g}") for value in short[key]]
    # Powers of two cover early training densely. The choice depends on the step only, so a resumed run writes the same
    # records.
    step = record["step"]
    is_power_of_two = step > 0 and step & (step - 1) == 0
    if step % every and not is_power_of_two:
        del short["expert_load"]
        # One bit per expert, layer by layer: idle experts must be known in every step to find dead ones.
        idle_LE = np.packbits(np.array(loads) == 0)
        short["expert_idle"] = base64.b64encode(zlib.compress(idle_LE.tobytes(), 9)).decode()
    return short


def idle_experts(record: Mapping[str, Any], num_experts: int) -> np.ndarray | None:
    """Return a bool array [L, E], True for experts without a token in this step; None if the record lacks it."""
    if record.get("expert_load"):
        return np.array(record["expert_load"]) == 0
    if not record.get("expert_idle"):
        return None
    size = len(record["expert_layers"]) * num_experts
    num_bytes = -(-size // 8)
    try:
        # Limit decompression to the expected size plus one byte: the text is untrusted.
        unpacked = zlib.decompressobj().decompress(base64.b64decode(record["expert_idle"]), num_bytes + 1)
    except (ValueError, zlib.error) as error:
        raise DataError(f"{METRICS_FILE}, step {record['step']}: expert_idle cannot be read ({error}).") from error
    if len(unpacked) != num_bytes:
        raise DataError(f"{METRICS_FILE}, step {record['step']}: expert_idle does not cover {size} experts.")
    bits = np.frombuffer(unpacked, dtype=np.uint8)
    return np.unpackbits(bits, count=size).astype(bool).reshape(-1, num_experts)

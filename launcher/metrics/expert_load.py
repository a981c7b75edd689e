"""Expert loads, the number of tokens routed to each expert of a layer: their figures, and their format on disk.

For a small model all counts are written in every step. For a large one that would be too much: 48 layers of 128 experts
have 6,144 counts a step, or half a gigabyte in 10,000 steps. Its records have each layer's figures and the idle experts
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
    """Return the layers that have experts, in order: the rows of every tensor with an L axis.

    Those after the last decoder layer are for multi-token prediction.
    """
    return [layer for layer in range(model.depth) if model.has_experts(layer)]


def max_over_mean(counts: Sequence[float]) -> float:
    """Return tokens of the busiest expert over the mean, ``max / (sum / E)``: 1.0 is even, E / top-k the worst.

    With experts spread over devices, the slowest device takes this many times longer. NaN if no token was routed.
    """
    total = sum(counts)
    if not total:
        return math.nan
    return max(counts) * len(counts) / total


def max_violation(counts: Sequence[float]) -> float:
    """Return the excess of the busiest expert, ``max / mean − 1``: 0 if even (MaxVio in arXiv 2408.15664)."""
    return max_over_mean(counts) - 1


def mean_violation(counts: Sequence[float]) -> float:
    """Return the mean deviation of experts from the mean, ``Σ |counts[e] − mean| / (E · mean)``: 0 if even.

    Half of it is the share of tokens that would have to move to other experts. NaN if no token was routed.
    """
    total = sum(counts)
    if not total:
        return math.nan
    return sum(abs(count - total / len(counts)) for count in counts) / total


def idle_share(counts: Sequence[float]) -> float:
    """Return the share of experts that got no token: ``#{e: counts[e] = 0} / E``."""
    if not counts:
        return math.nan
    return sum(1 for count in counts if count == 0) / len(counts)


def load_entropy(counts: Sequence[float]) -> float:
    """Return the entropy ``−Σ p·ln p`` in nats, with ``p = counts / sum``: ln E is even, ln top-k the worst."""
    total = sum(counts)
    if not total:
        return math.nan
    # + 0.0 turns the −0.0 of a load on one expert into 0.0.
    return -sum(p * math.log(p) for p in (count / total for count in counts) if p > 0) + 0.0


def layer_numbers(record: Mapping[str, Any]) -> list[int]:
    """Return the layer of each row of ``expert_load``: ``expert_layers``, or row numbers if the record lacks it."""
    return record.get("expert_layers") or list(range(len(record.get("expert_load") or [])))


DEAD_AFTER_STEPS = 50
"""Steps in a row without a token after which an expert is called dead."""


def expert_name(layer: int, expert: int) -> str:
    """Return the expert's name as in its weights: ``model.layers.3.mlp.experts.7``."""
    return f"model.layers.{layer}.mlp.experts.{expert}"


def worst_max_over_mean(expert_load: Sequence[Sequence[float]]) -> float | None:
    """Return ``max_over_mean`` of the least balanced layer; None for a dense model or if no token was routed."""
    figures = [max_over_mean(layer) for layer in expert_load if sum(layer)]
    return max(figures, default=None)


WHOLE_COUNTS = 512
"""Most counts of a step, layers times experts, that are written in every step."""
MEAN_COUNTS = 96
"""Counts a step, on average over the steps, that are written of a larger model."""
DIGITS = 5
"""Significant digits of a larger model's figures."""

FIGURE_KEYS = (
    "expert_max_violation",
    "expert_mean_violation",
    "expert_dropped_share",
    "router_entropy",
    "router_logit_rms",
)
"""Keys of a train record that have one number for each expert layer, in the order of ``expert_layers``."""


def steps_between_loads(counts: int) -> int:
    """Return the number of steps between two records with all counts; ``counts`` is layers times experts."""
    if counts <= WHOLE_COUNTS:
        return 1
    return math.ceil(counts / MEAN_COUNTS)


def shortened(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record to write: a large model's has rounded figures and, in most steps, no counts.

    All counts are written in the steps divisible by ``steps_between_loads``, and in steps 1, 2, 4, 8, … A record
    depends on its own step only, so a resumed run writes the same ones.
    """
    loads = record.get("expert_load") or []
    if not loads:
        return dict(record)
    every = steps_between_loads(len(loads) * len(loads[0]))
    short = dict(record)
    if every == 1:
        return short
    for key in FIGURE_KEYS:
        if short.get(key):
            short[key] = [float(f"{value:.{DIGITS}g}") for value in short[key]]
    step = record["step"]
    is_power_of_two = step > 0 and step & (step - 1) == 0
    if step % every and not is_power_of_two:
        del short["expert_load"]
        # One bit per expert, layer after layer.
        idle_LE = np.packbits(np.array(loads) == 0)
        short["expert_idle"] = base64.b64encode(zlib.compress(idle_LE.tobytes(), 9)).decode()
    return short


def idle_experts(record: Mapping[str, Any], num_experts: int) -> np.ndarray | None:
    """Return a bool array [L, E] of the experts that got no token in this step; None if the record lacks it."""
    if record.get("expert_load"):
        return np.array(record["expert_load"]) == 0
    if not record.get("expert_idle"):
        return None
    size = len(record["expert_layers"]) * num_experts
    num_bytes = -(-size // 8)
    try:
        # Decompress no more than there are experts: the text is untrusted.
        unpacked = zlib.decompressobj().decompress(base64.b64decode(record["expert_idle"]), num_bytes + 1)
    except (ValueError, zlib.error) as error:
        raise DataError(f"{METRICS_FILE}, step {record['step']}: expert_idle cannot be read ({error}).") from error
    if len(unpacked) != num_bytes:
        raise DataError(f"{METRICS_FILE}, step {record['step']}: expert_idle is not of {size} experts.")
    bits = np.frombuffer(unpacked, dtype=np.uint8)
    return np.unpackbits(bits, count=size).astype(bool).reshape(-1, num_experts)

"""Expert loads, how many tokens chose each expert of a layer: their figures, and how they are kept on disk.

Of a small model all counts of every step are written; of a large one all counts now and then. A model of 48 layers and
128 experts has 6,144 counts a step: written out, 10,000 steps would be half a gigabyte. Its records have the figures of
each layer, and which experts were idle, in every step, and the counts in some.

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
    """The layers that have experts, in order: the rows of every tensor with an L axis.

    Those behind the last layer are for multi-token prediction.
    """
    return [layer for layer in range(model.depth) if model.has_experts(layer)]


def max_over_mean(counts: Sequence[float]) -> float:
    """Tokens of the busiest expert over the mean, ``max / (sum / E)``: 1.0 is even, E / top-k the worst.

    With experts spread over devices this is how much longer the slowest one computes. NaN when no token was routed.
    """
    total = sum(counts)
    if not total:
        return math.nan
    return max(counts) * len(counts) / total


def max_violation(counts: Sequence[float]) -> float:
    """How far the busiest expert lies above the mean: ``max / mean − 1``, 0 when even (arXiv 2408.15664: MaxVio)."""
    return max_over_mean(counts) - 1


def mean_violation(counts: Sequence[float]) -> float:
    """How far experts lie from the mean, on average: ``Σ |counts[e] − mean| / (E · mean)``, 0 when even.

    Half of it is the share of tokens that another expert would have to take. NaN when no token was routed.
    """
    total = sum(counts)
    if not total:
        return math.nan
    return sum(abs(count - total / len(counts)) for count in counts) / total


def idle_share(counts: Sequence[float]) -> float:
    """Share of experts that got no token: ``#{e: counts[e] = 0} / E``."""
    if not counts:
        return math.nan
    return sum(1 for count in counts if count == 0) / len(counts)


def load_entropy(counts: Sequence[float]) -> float:
    """``−Σ p·ln p`` in nats with ``p = counts / sum``: ln E is even, ln top-k the worst."""
    total = sum(counts)
    if not total:
        return math.nan
    # + 0.0 turns the −0.0 of a load on one expert into 0.0.
    return -sum(p * math.log(p) for p in (count / total for count in counts) if p > 0) + 0.0


def layer_numbers(record: Mapping[str, Any]) -> list[int]:
    """The layer of each row of ``expert_load``: ``expert_layers``, or the rows counted where a record lacks it."""
    return record.get("expert_layers") or list(range(len(record.get("expert_load") or [])))


DEAD_AFTER_STEPS = 50
"""Steps in a row without a token after which an expert is called dead."""


def expert_name(layer: int, expert: int) -> str:
    """The expert as its weights are named: ``model.layers.3.mlp.experts.7``."""
    return f"model.layers.{layer}.mlp.experts.{expert}"


def worst_max_over_mean(expert_load: Sequence[Sequence[float]]) -> float | None:
    """``max_over_mean`` of the least even layer; None for a dense model or when nothing was routed."""
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
    """Steps from one record with all counts, layers times experts, to the next."""
    if counts <= WHOLE_COUNTS:
        return 1
    return math.ceil(counts / MEAN_COUNTS)


def shortened(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record as it is written: of a large model with rounded figures, and in most steps without its counts.

    All counts stand in the steps that ``steps_between_loads`` divides, and in steps 1, 2, 4, 8, … A record depends on
    its own step alone, so a resumed run writes the same ones.
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
        # One bit an expert, layer after layer.
        idle_LE = np.packbits(np.array(loads) == 0)
        short["expert_idle"] = base64.b64encode(zlib.compress(idle_LE.tobytes(), 9)).decode()
    return short


def idle_experts(record: Mapping[str, Any], num_experts: int) -> np.ndarray | None:
    """Which experts got no token in this step, bool [L, E]; None where the record does not say."""
    if record.get("expert_load"):
        return np.array(record["expert_load"]) == 0
    if not record.get("expert_idle"):
        return None
    size = len(record["expert_layers"]) * num_experts
    num_bytes = -(-size // 8)
    try:
        # No more than there are experts: the text may be anybody's.
        unpacked = zlib.decompressobj().decompress(base64.b64decode(record["expert_idle"]), num_bytes + 1)
    except (ValueError, zlib.error) as error:
        raise DataError(f"{METRICS_FILE}, step {record['step']}: expert_idle cannot be read ({error}).") from error
    if len(unpacked) != num_bytes:
        raise DataError(f"{METRICS_FILE}, step {record['step']}: expert_idle is not of {size} experts.")
    bits = np.frombuffer(unpacked, dtype=np.uint8)
    return np.unpackbits(bits, count=size).astype(bool).reshape(-1, num_experts)

"""Expert loads on disk: all counts of every step of a small model; of a large one all counts now and then.

A model of 48 layers and 128 experts has 6,144 counts a step: written out, 10,000 steps would be half a gigabyte. Its
records have the few figures of each layer, and which experts were idle, in every step, and the counts in some.

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
from longctx.errors import DataError

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


def steps_between_loads(num_layers: int, num_experts: int) -> int:
    """Steps from one record with all counts to the next."""
    counts = num_layers * num_experts
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
    every = steps_between_loads(len(loads), len(loads[0]))
    if every == 1:
        return dict(record)
    short = dict(record)
    for key in FIGURE_KEYS:
        if short.get(key):
            short[key] = [_rounded(value) for value in short[key]]
    step = record["step"]
    is_power_of_two = step > 0 and step & (step - 1) == 0
    if step % every and not is_power_of_two:
        del short["expert_load"]
        short["expert_idle"] = pack_idle(loads)
    return short


def pack_idle(loads: Sequence[Sequence[float]]) -> str:
    """Which experts got no token, as text: one bit an expert, layer after layer, compressed, in base64."""
    idle_LE = np.array(loads) == 0
    return base64.b64encode(zlib.compress(np.packbits(idle_LE).tobytes(), 9)).decode()


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


def _rounded(value: float) -> float:
    """The figure with ``DIGITS`` significant digits; what is not finite stays as it is."""
    return float(f"{value:.{DIGITS}g}")

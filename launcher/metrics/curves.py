"""The curves of a record, as every tracker gets them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.metrics.expert_history import FIGURE_KEYS
from launcher.metrics.expert_load import idle_share, layer_numbers, load_entropy, max_over_mean


def curves(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a record's numbers, its expert figures by layer and its loss by position, by name of the curve."""
    kind = record["kind"]
    if kind == "event":
        return {}
    pairs = [
        (f"{kind}/{key}", float(value))
        for key, value in record.items()
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    ]
    # Of a large model layers have curves in the steps whose counts are written: a point a layer and step is too much.
    if record.get("expert_load"):
        pairs += _of_layers(record)
    for name, tokens in (record.get("source_tokens") or {}).items():
        pairs.append((f"source_tokens/{name}", float(tokens)))
    for name, source in (record.get("loss_by_source") or {}).items():
        pairs.append((f"validation_loss_by_source/{name}", float(source["loss"])))
    for spot in record.get("loss_by_position") or []:
        pairs.append((f"validation_loss_by_position/from_{spot['start']}", float(spot["loss"])))
    return dict(pairs)


def _of_layers(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The curves of each expert layer."""
    pairs: list[tuple[str, float]] = []
    layers = layer_numbers(record)
    for layer, counts in zip(layers, record["expert_load"], strict=True):
        pairs.append((f"expert_max_over_mean/layer_{layer}", max_over_mean(counts)))
        pairs.append((f"expert_idle_share/layer_{layer}", idle_share(counts)))
        pairs.append((f"expert_load_entropy/layer_{layer}", load_entropy(counts)))
    # Runs of earlier releases lack some of these keys.
    for key in FIGURE_KEYS:
        pairs += [
            (f"{key}/layer_{layer}", float(value)) for layer, value in zip(layers, record.get(key) or [], strict=False)
        ]
    return pairs

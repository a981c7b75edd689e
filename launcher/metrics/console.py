"""A record as one line of the console."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from launcher.metrics.expert_load import worst_max_over_mean


def short_number(value: float) -> str:
    """Three or four significant digits with k, M, G or T: ``10132 -> 10.1k``."""
    if not math.isfinite(value):
        return str(value)
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # What rounds up to the unit has it: 999.96 is 1.0k, not 1000.
        if abs(value) >= size * 0.9995:
            scaled = value / size
            if abs(scaled) >= 99.95:
                return f"{scaled:.0f}{unit}"
            return f"{scaled:.1f}{unit}"
    if float(value).is_integer() or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}"


def console_line(record: Mapping[str, Any], total_steps: int | None = None) -> str:
    """A record as one line: fixed order, units; what the record does not know is left out."""
    step = str(record["step"])
    if total_steps is not None:
        # As wide as the last step, so that the columns of a run stand below each other.
        step = f"{record['step']:>{len(str(total_steps))}}/{total_steps}"
    parts = {"train": _train_parts, "validation": _validation_parts, "event": _event_parts}[record["kind"]](record)
    parts.insert(0, f"step {step}")
    return "  ".join(parts)


def _train_parts(record: Mapping[str, Any]) -> list[str]:
    formats = (
        ("loss", lambda x: f"loss {x:.4f}"),
        ("grad_norm", lambda x: f"grad {x:.2f}"),
        ("lr", lambda x: f"lr {x:.1e}"),
        ("tokens_per_second", lambda x: f"{short_number(x)} tok/s"),
        ("step_seconds", lambda x: f"{x:.2f} s"),
        ("data_wait_seconds", lambda x: f"data {x:.2f} s"),
        ("max_memory_bytes", lambda x: f"mem {x / 2**30:.1f} GiB"),
        ("mfu", lambda x: f"mfu {x:.1%}"),
    )
    parts = []
    for key, form in formats:
        # Where a device cannot tell its peak memory, the record says 0.
        is_unknown = record.get(key) is None or (key == "max_memory_bytes" and not record[key])
        if not is_unknown:
            parts.append(form(record[key]))
    worst = worst_max_over_mean(record.get("expert_load") or [])
    if worst is not None:
        parts.append(f"experts max/mean {worst:.2f}")
    dropped = max(record.get("expert_dropped_share") or [], default=0)
    if dropped > 0:
        parts.append(f"dropped {dropped:.1%}")
    return parts


def _validation_parts(record: Mapping[str, Any]) -> list[str]:
    parts = [f"validation loss {record['loss']:.4f}"]
    entropy = record.get("unigram_entropy")
    if entropy is not None:
        parts.append(f"unigram entropy {entropy:.4f}  ({record['loss'] - entropy:+.4f} nats)")
    if record.get("num_targets") is not None:
        parts.append(f"{short_number(record['num_targets'])} targets")
    return parts


def _event_parts(record: Mapping[str, Any]) -> list[str]:
    return [str(record["event"])]

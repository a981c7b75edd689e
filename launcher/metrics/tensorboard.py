"""TensorBoard: the curves of a run, made from its records."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.metrics.expert_history import FIGURE_KEYS
from launcher.metrics.expert_load import idle_share, layer_numbers, load_entropy, max_over_mean
from launcher.metrics.record import METRICS_FILE, read_metrics
from longctx.errors import ConfigError

TENSORBOARD_FOLDER = "tensorboard"


def check_tensorboard() -> None:
    """Raise ConfigError when TensorBoard is not installed. Call it on every rank, before any waits for another."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "TensorBoard curves are asked for, but the tensorboard package is not installed.\n"
            "Try `pip install tensorboard`, or switch them off: metrics.jsonl holds the same numbers."
        )


def first_new_step(folder: Path) -> int | None:
    """The step after the last record of a run folder, 0 where all were set aside; None of a new run."""
    if not (folder / METRICS_FILE).is_file():
        return None
    steps = [record["step"] for record in read_metrics(folder)]
    # A start that begins anew draws over one that never saved.
    if not steps:
        return 0
    return max(steps) + 1


def open_tensorboard(folder: Path, purge_step: int | None) -> Any:
    """A SummaryWriter that hides curves from ``purge_step`` on: a killed run may have drawn steps that come again."""
    # Importing it takes seconds, and only rank 0 draws.
    from torch.utils.tensorboard import SummaryWriter

    if not isinstance(threading.excepthook, _WithoutTensorBoard):
        threading.excepthook = _WithoutTensorBoard(threading.excepthook)
    return SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=purge_step, flush_secs=30)


class _WithoutTensorBoard:
    """Says nothing of a disk that refused what TensorBoard's thread wrote: the next call of its writer raises that."""

    def __init__(self, others: Callable[[threading.ExceptHookArgs], object]) -> None:
        self._others = others

    def __call__(self, args: threading.ExceptHookArgs, /) -> None:
        if isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard."):
            return
        self._others(args)


def scalars(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The TensorBoard curves of a record as (tag, value): its numbers, expert figures a layer, loss by position."""
    if record["kind"] == "event":
        return []
    kind = record["kind"]
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
    return pairs


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

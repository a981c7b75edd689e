"""The record of a run: ``metrics.jsonl``, and the console line and TensorBoard curves made from the same records.

Rank 0 alone writes. A record is a plain dict of one of three kinds, told by its ``kind``: ``train`` (one a step),
``validation`` and ``event`` (a resume). ``docs/run-folder.md`` defines every key.

JSON has no NaN, and a loss may be one. A number that is not finite is written as ``null``, and the record gains
``"non_finite": {"loss": "nan"}``: dotted path to ``nan``, ``inf`` or ``-inf``. So ``null`` alone means *not known*.
``read_metrics`` puts the numbers back.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from longctx.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

Record = dict[str, Any]
"""One line of ``metrics.jsonl``."""

METRICS_FILE = "metrics.jsonl"
DISCARDED_FILE = "metrics.discarded.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

TIMING_KEYS = frozenset(
    {"tokens_per_second", "step_seconds", "data_wait_seconds", "max_memory_bytes", "model_tflops", "mfu", "time"}
)
"""Keys that may differ between two runs that computed the same thing."""

REQUIRED_KEYS: Mapping[str, tuple[str, ...]] = {
    "train": ("step", "loss"),
    "validation": ("step", "loss"),
    "event": ("step", "event"),
}
"""What every record of a kind carries; readers treat any other key as optional."""

PER_LAYER_KEYS = (
    "expert_max_violation",
    "expert_mean_violation",
    "expert_dropped_share",
    "router_entropy",
    "router_logit_rms",
)
"""Keys of a train record that have one number for each expert layer, in the order of ``expert_layers``."""

_NON_FINITE = "non_finite"
_DECODE_ERRORS = (ValueError, LookupError, TypeError, AttributeError)


# Expert load: pure figures of one layer's token counts.


def max_over_mean(counts: Sequence[float]) -> float:
    """Tokens of the busiest expert over the mean, ``max / (sum / E)``: 1.0 is even, E / top-k the worst.

    With experts spread over devices this is how much longer the slowest one computes. NaN when no token was routed.
    """
    total = sum(counts)
    return max(counts) * len(counts) / total if total else math.nan


def max_violation(counts: Sequence[float]) -> float:
    """How far the busiest expert lies above the mean: ``max / mean − 1``, 0 when even (arXiv 2408.15664: MaxVio)."""
    return max_over_mean(counts) - 1


def mean_violation(counts: Sequence[float]) -> float:
    """How far experts lie from the mean, on average: ``Σ |counts[e] − mean| / (E · mean)``, 0 when even.

    Half of it is the share of tokens that another expert would have to take. NaN when no token was routed.
    """
    total = sum(counts)
    return sum(abs(count - total / len(counts)) for count in counts) / total if total else math.nan


def idle_share(counts: Sequence[float]) -> float:
    """Share of experts that got no token: ``#{e: counts[e] = 0} / E``."""
    return sum(1 for count in counts if count == 0) / len(counts) if counts else math.nan


def load_entropy(counts: Sequence[float]) -> float:
    """``−Σ p·ln p`` in nats with ``p = counts / sum``: ln E is even, ln top-k the worst."""
    total = sum(counts)
    if not total:
        return math.nan
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


# Records as text.


def without_timing(record: Mapping[str, Any]) -> Record:
    """The part of a record that two equal runs share: everything but ``TIMING_KEYS``."""
    return {key: value for key, value in record.items() if key not in TIMING_KEYS}


def encode(record: Mapping[str, Any]) -> str:
    """A record as one line of strict JSON, newline not included."""
    try:
        return json.dumps(record, allow_nan=False)
    except ValueError:  # some number is not finite: the rare case pays for the search
        found: dict[str, str] = {}
        finite = {key: _take_non_finite(value, key, found) for key, value in record.items()}
        return json.dumps({**finite, _NON_FINITE: found}, allow_nan=False)


def decode(line: str | bytes) -> Record:
    """The record of one line; ValueError says what is wrong with it."""
    record = json.loads(line, parse_constant=_refuse_constant)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    for path, text in record.pop(_NON_FINITE, {}).items():
        _put_back(record, path, float(text))
    check_record(record)
    return record


def check_record(record: Mapping[str, Any]) -> None:
    """Raise ValueError unless the record has a known kind, that kind's keys and a whole-number step."""
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in REQUIRED_KEYS:
        raise ValueError(f"kind={kind!r} must be one of {sorted(REQUIRED_KEYS)}")
    if missing := [key for key in REQUIRED_KEYS[kind] if key not in record]:
        raise ValueError(f"a {kind} record lacks {missing}")
    step = record["step"]
    if not isinstance(step, int) or isinstance(step, bool):
        raise ValueError(f"step={step!r} must be a whole number")


def _take_non_finite(value: Any, path: str, found: dict[str, str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        found[path] = str(float(value))
        return None
    if isinstance(value, dict):
        return {key: _take_non_finite(item, f"{path}.{key}", found) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_take_non_finite(item, f"{path}.{index}", found) for index, item in enumerate(value)]
    return value


def _put_back(record: Record, path: str, number: float) -> None:
    holder: Any = record
    *parents, last = path.split(".")
    for part in parents:
        holder = holder[int(part)] if isinstance(holder, list) else holder[part]
    holder[int(last) if isinstance(holder, list) else last] = number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# Reading and cutting the file.


def read_metrics(folder: Path | str) -> list[Record]:
    """Every record of a run folder, in the order written; DataError names file and line of anything else.

    A last line without an end, which a killed run leaves behind, is passed over with a warning.
    """
    path = Path(folder) / METRICS_FILE
    if not path.is_file():
        raise DataError(f"{path} does not exist. Give the run's folder (run.output_dir), which holds {METRICS_FILE}.")
    lines, torn = _split_lines(path.read_bytes())
    if torn:
        logger.warning("%s:%d: passed over a line that was cut short", path, len(lines) + 1)
    return list(_decode_lines(path, lines))


def truncate_after(folder: Path | str, step: int) -> int:
    """Move rows of later steps than ``step`` to ``metrics.discarded.jsonl``; returns how many lines moved.

    Called on resume, before the writer opens, with the checkpoint's step (-1 moves everything). A torn last line
    moves as it is. The rows are safe in the second file before the first is replaced, so being killed in between
    can repeat rows there but never lose one.
    """
    return _settle(Path(folder), last_step=step)


def _settle(folder: Path, *, last_step: int | None) -> int:
    """Leave only whole lines of steps up to ``last_step`` (None: of any step) in ``metrics.jsonl``."""
    path = folder / METRICS_FILE
    if not path.is_file():
        return 0
    data = path.read_bytes()
    lines, torn = _split_lines(data)
    steps = [record["step"] for record in _decode_lines(path, lines)]
    kept = [line for line, step in zip(lines, steps, strict=True) if last_step is None or step <= last_step]
    moved = [line for line, step in zip(lines, steps, strict=True) if last_step is not None and step > last_step]
    if torn:
        moved.append(torn)
    text = b"".join(line + b"\n" for line in kept)
    if moved:
        _append_durably(folder / DISCARDED_FILE, moved)
    if text != data:
        _replace(path, text)
    return len(moved)


def _split_lines(data: bytes) -> tuple[list[bytes], bytes]:
    """Whole lines, and what a killed writer left after them. An unfinished line that is a whole record is a line."""
    *lines, tail = data.split(b"\n")
    if tail and _is_record(tail):
        return [*lines, tail], b""
    return lines, tail


def _is_record(line: bytes) -> bool:
    try:
        decode(line)
    except _DECODE_ERRORS:
        return False
    return True


def _decode_lines(path: Path, lines: Sequence[bytes]) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        try:
            yield decode(line)
        except _DECODE_ERRORS as error:
            raise DataError(
                f"{path}:{number}: not a metrics record: {error}.\n"
                "The file is written one JSON object a line; mend or remove this line."
            ) from error


def _append_durably(path: Path, lines: Sequence[bytes]) -> None:
    torn = path.is_file() and not (path.read_bytes() or b"\n").endswith(b"\n")
    with path.open("ab") as file:
        file.write((b"\n" if torn else b"") + b"".join(line + b"\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


def _replace(path: Path, text: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


# Writing.


def check_tensorboard() -> None:
    """Raise ConfigError when TensorBoard is not installed. Call it on every rank, before any waits for another."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "TensorBoard curves are asked for, but the tensorboard package is not installed.\n"
            "Try `pip install tensorboard`, or switch them off: metrics.jsonl holds the same numbers."
        )


class MetricsWriter:
    """Appends records to a run folder's ``metrics.jsonl`` (flushed line by line) and to its TensorBoard folder.

    One writer a run, on rank 0. Opening sets aside a torn last line, so a new record never joins it.
    """

    def __init__(self, folder: Path | str, *, tensorboard: bool = True) -> None:
        if tensorboard:
            check_tensorboard()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _settle(folder, last_step=None)
        self._tensorboard = _open_tensorboard(folder) if tensorboard else None
        self._file = (folder / METRICS_FILE).open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; ``time`` is added where it is missing. ValueError when a required key is."""
        if "time" not in record:
            record = {**record, "time": timestamp()}
        check_record(record)
        self._file.write(encode(record) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for tag, value in scalars(record):
                self._tensorboard.add_scalar(tag, value, record["step"])
            if record["kind"] != "train":
                self._tensorboard.flush()

    def close(self) -> None:
        """Close both; safe to call twice."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def timestamp() -> str:
    """Now, as the ISO 8601 text that records carry: UTC, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _open_tensorboard(folder: Path) -> Any:
    """A SummaryWriter that hides curves beyond the last record: a killed run may have drawn steps that come again."""
    from torch.utils.tensorboard import SummaryWriter

    records = read_metrics(folder) if (folder / METRICS_FILE).is_file() else []
    purge_step = max(record["step"] for record in records) + 1 if records else None
    return SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=purge_step, flush_secs=30)


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
    layers = layer_numbers(record)
    for layer, counts in zip(layers, record.get("expert_load") or [], strict=True):
        pairs.append((f"expert_max_over_mean/layer_{layer}", max_over_mean(counts)))
        pairs.append((f"expert_idle_share/layer_{layer}", idle_share(counts)))
        pairs.append((f"expert_load_entropy/layer_{layer}", load_entropy(counts)))
    for key in PER_LAYER_KEYS:
        pairs += [
            (f"{key}/layer_{layer}", float(value)) for layer, value in zip(layers, record.get(key) or [], strict=False)
        ]
    for spot in record.get("loss_by_position") or []:
        pairs.append((f"validation_loss_by_position/from_{spot['start']}", float(spot["loss"])))
    return pairs


# The console.


def short_number(value: float) -> str:
    """Three or four significant digits with k, M, G or T: ``10132 -> 10.1k``."""
    if not math.isfinite(value):
        return str(value)
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.{0 if abs(scaled) >= 99.95 else 1}f}{unit}"
    return f"{value:.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.1f}"


def console_line(record: Mapping[str, Any], total_steps: int | None = None) -> str:
    """A record as one line: fixed order, units; what the record does not know is left out."""
    step = str(record["step"]) if total_steps is None else f"{record['step']:>{len(str(total_steps))}}/{total_steps}"
    parts = {"train": _train_parts, "validation": _validation_parts, "event": _event_parts}[record["kind"]](record)
    return "  ".join([f"step {step}", *parts])


def _train_parts(record: Mapping[str, Any]) -> list[str]:
    formats = (
        ("loss", lambda x: f"loss {x:.4f}"),
        ("grad_norm", lambda x: f"grad {x:.2f}"),
        ("lr", lambda x: f"lr {x:.1e}"),
        ("tokens_per_second", lambda x: f"{short_number(x)} tok/s"),
        ("step_seconds", lambda x: f"{x:.2f} s"),
        ("data_wait_seconds", lambda x: f"data {x:.2f} s"),
        ("max_memory_bytes", lambda x: f"mem {x / 2**30:.1f} GiB" if x else ""),
        ("mfu", lambda x: f"mfu {x:.1%}"),
    )
    parts = [form(record[key]) for key, form in formats if record.get(key) is not None]
    worst = worst_max_over_mean(record.get("expert_load") or [])
    if worst is not None:
        parts.append(f"experts max/mean {worst:.2f}")
    dropped = max(record.get("expert_dropped_share") or [], default=0)
    if dropped > 0:
        parts.append(f"dropped {dropped:.1%}")
    return [part for part in parts if part]


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

"""Metrics records: the lines in ``metrics.jsonl``.

Only rank 0 writes them. A record is a plain dict with its kind in ``kind``: ``train`` (one per step, built by
``launcher/training/train_step.py``), ``validation`` or ``event`` (a resume). ``docs/run-folder.md`` defines every key.

JSON has no NaN, but a loss may be NaN. A non-finite number is written as ``null``, and the record gets ``"non_finite":
{"loss": "nan"}``: dotted path to ``nan``, ``inf`` or ``-inf``. So ``null`` alone means *not known*. ``read_metrics``
restores the numbers.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from longctx.errors import DataError
from longctx.files import replaced_file
from longctx.untrusted.strict_json import parse_json

logger = logging.getLogger(__name__)

Record = dict[str, Any]
"""One line in ``metrics.jsonl``."""

METRICS_FILE = "metrics.jsonl"
STOP_EVENT = "stop"
"""Event for a requested stop."""
AUDIT_EVENT = "audit"
"""Event for a wrong number found by an audit (``run.audit_every``, ``run.replicas_every``)."""
DISCARDED_FILE = "metrics.discarded.jsonl"

TIMING_KEYS = frozenset(
    {"bytes", "hardware", "peak_bytes", "peak_error", "seconds", "seconds_error"}
    | {"tokens_per_second", "step_seconds", "data_wait_seconds", "max_memory_bytes", "model_tflops", "mfu", "time"}
    | {"goodput", "stalls", "stalled_seconds", "restarts"}
)
"""Keys that may differ between two runs with equal computation."""

REQUIRED_KEYS = {"train": ("step", "loss"), "validation": ("step", "loss"), "event": ("step", "event")}
"""Required keys per kind; readers treat any other key as optional."""

_NON_FINITE = "non_finite"


def without_timing(record: Mapping[str, Any]) -> Record:
    """Return the record without ``TIMING_KEYS``: the part that two equal runs share."""
    return {key: value for key, value in record.items() if key not in TIMING_KEYS}


def encode(record: Mapping[str, Any]) -> str:
    """Encode a record as one line of strict JSON, without the newline."""
    try:
        return json.dumps(record, allow_nan=False)
    except ValueError:
        # Search only if encoding fails: non-finite numbers are rare.
        found: dict[str, str] = {}
        finite = {key: _take_non_finite(value, key, found) for key, value in record.items()}
        return json.dumps({**finite, _NON_FINITE: found}, allow_nan=False)


def decode(line: bytes) -> Record:
    """Parse one line into a record; raise ValueError with the reason if it is malformed."""
    record = parse_json(line)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    try:
        for path, text in record.pop(_NON_FINITE, {}).items():
            _put_back(record, path, float(text))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{_NON_FINITE}: {error!r}") from error
    check_record(record)
    return record


def check_record(record: Mapping[str, Any]) -> None:
    """Raise ValueError unless the record has a known kind, that kind's keys and an integer step."""
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in REQUIRED_KEYS:
        raise ValueError(f"kind={kind!r} must be one of {sorted(REQUIRED_KEYS)}")
    if missing := [key for key in REQUIRED_KEYS[kind] if key not in record]:
        raise ValueError(f"a {kind} record lacks {missing}")
    step = record["step"]
    # In Python a bool is an int.
    if not isinstance(step, int) or isinstance(step, bool):
        raise ValueError(f"step={step!r} must be an integer")


def _take_non_finite(value: Any, path: str, found: dict[str, str]) -> Any:
    """Replace non-finite numbers by null; store each in ``found`` under its dotted path."""
    if isinstance(value, float) and not math.isfinite(value):
        found[path] = str(float(value))
        return None
    if isinstance(value, dict):
        return {key: _take_non_finite(item, f"{path}.{key}", found) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_take_non_finite(item, f"{path}.{index}", found) for index, item in enumerate(value)]
    return value


def _put_back(holder: Any, path: str, number: float) -> None:
    """Set the number at a dotted path made of object keys and list indices."""
    part, _, rest = path.partition(".")
    key: Any = part
    if isinstance(holder, list):
        key = int(part)
    if rest:
        _put_back(holder[key], rest, number)
    else:
        holder[key] = number


def read_metrics(folder: Path | str) -> list[Record]:
    """Return a run folder's records in written order; raise DataError with file and line if one is malformed.

    An unterminated last line, left by a killed run, is skipped with a warning.
    """
    path = Path(folder) / METRICS_FILE
    if not path.is_file():
        raise DataError(f"{path} does not exist. Give the run's folder (run.output_dir), which holds {METRICS_FILE}.")
    lines, torn = _split_lines(path.read_bytes())
    if torn:
        logger.warning("%s:%d: skipped a truncated line", path, len(lines) + 1)
    return list(_decode_lines(path, lines))


def readable_records(path: Path, having: str = "") -> Iterator[Record]:
    """Yield records from lines that contain the text ``having``; empty if the file does not exist.

    Lines cut short by a kill or broken by editing are skipped.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if having.encode() in line:
                with suppress(ValueError):
                    yield decode(line)


def missing_steps(folder: Path | str, step: int) -> list[range]:
    """Return the step ranges up to ``step`` without rows, in order; only the folder's own steps count."""
    path = Path(folder) / METRICS_FILE
    records: list[Record] = []
    if path.is_file():
        records = read_metrics(folder)
    taken = {record["step"] for record in records if record["kind"] == "train"}
    first = 0
    # A run that continued in a new folder has rows from there on, and its first row is the resume.
    if records and records[0].get("event") == "resume":
        first = records[0]["step"]
    found: list[range] = []
    for one in sorted(set(range(first + 1, step + 1)) - taken):
        if found and found[-1].stop == one:
            found[-1] = range(found[-1].start, one + 1)
        else:
            found.append(range(one, one + 1))
    return found


def truncate_after(folder: Path, step: int | None) -> int:
    """Move rows after ``step`` to ``metrics.discarded.jsonl``; return the number of lines moved.

    Called on resume, before the writer opens, with the checkpoint's step; -1 moves everything, None only a torn last
    line, unchanged.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        return 0
    data = path.read_bytes()
    lines, torn = _split_lines(data)
    remaining: list[bytes] = []
    moved: list[bytes] = []
    for line, record in zip(lines, _decode_lines(path, lines), strict=True):
        if step is None or record["step"] <= step:
            remaining.append(line)
        else:
            moved.append(line)
    if torn:
        moved.append(torn)
    text = b"".join(line + b"\n" for line in remaining)
    # The second file gets the rows before the first is replaced: a kill in between can repeat rows but never lose one.
    if moved:
        _append_durably(folder / DISCARDED_FILE, moved)
    if text != data:
        with replaced_file(path) as temporary:
            temporary.write_bytes(text)
    return len(moved)


def _split_lines(data: bytes) -> tuple[list[bytes], bytes]:
    """Return complete lines and a killed writer's unfinished rest; a rest that is a valid record is a line."""
    *lines, tail = data.split(b"\n")
    try:
        decode(tail)
    except ValueError:
        return lines, tail
    # The writer was killed between a record and its newline.
    return [*lines, tail], b""


def _decode_lines(path: Path, lines: Sequence[bytes]) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        try:
            yield decode(line)
        except ValueError as error:
            raise DataError(
                f"{path}:{number}: not a metrics record: {error}.\nThe file has one JSON object per line; fix or "
                "remove this line."
            ) from error


def _append_durably(path: Path, lines: Sequence[bytes]) -> None:
    """Append lines and return once they are on disk."""
    torn = path.is_file() and not (path.read_bytes() or b"\n").endswith(b"\n")
    with path.open("ab") as file:
        # A kill during an earlier append may have cut a line: start on a new one.
        if torn:
            file.write(b"\n")
        file.write(b"".join(line + b"\n" for line in lines))
        file.flush()
        # The caller replaces the first file next, so these lines must be on disk.
        os.fsync(file.fileno())

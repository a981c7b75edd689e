"""Evaluation output folder: its settings, and every row as soon as it is known."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash

from launcher.evaluation.evaluated_model import EvaluatedModel, Texts
from launcher.evaluation.evaluation_options import EvaluationOptions
from launcher.report.evaluation.evaluation_folder import (
    RESULTS_FILE,
    SETTINGS_FILE,
    Key,
    encode_row,
    read_rows,
    read_settings,
    whole_bytes,
)
from longctx import __version__
from longctx.errors import ConfigError, DataError
from longctx.evaluation import ScoreRow
from longctx.evaluation.losses import LossRow
from longctx.files import convert_write_errors, write_atomically

log = logging.getLogger(__name__)

LOCK_FILE = ".evaluation.lock"
_MAY_DIFFER = ("date", "version", "model", "checkpoint")
"""Settings that a second call in the same folder may change: a checkpoint that was moved has the same weights."""


def settings_of(options: EvaluationOptions, evaluated: EvaluatedModel) -> dict[str, Any]:
    """Return all settings that affect a row, except task, length and index; degrees and device do not count."""
    return {
        # Parallel degrees and device change rounding only, so a resume may use others.
        "model": evaluated.name,
        "checkpoint": str(evaluated.folder.resolve()),
        "weights": evaluated.fingerprint,
        "tokenizer": evaluated.tokenizer.fingerprint,
        "chat": evaluated.chat,
        "dtype": options.dtype,
        "seed": options.seed,
        "depths": list(options.depths),
        "answer_tokens": options.answer_tokens,
        "teacher_forced_from": options.teacher_forced_from,
        "longppl": asdict(options.longppl),
        "ruler": {name: path and str(path.resolve()) for name, path in asdict(options.ruler).items()},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "version": __version__,
    }


def text_settings(evaluated: EvaluatedModel) -> dict[str, Any]:
    """Return additional settings for rows that read text."""
    haystack = None
    if evaluated.setting.haystack is not None:
        digest = xxhash.xxh3_128()
        for sentence in evaluated.setting.haystack.sentences:
            digest.update(sentence.encode())
        haystack = digest.hexdigest()
    folder = evaluated.text_folder
    if isinstance(folder, Path):
        folder = folder.resolve()
    return {"haystack": haystack, "text_folder": folder and str(folder)}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder and lock it for this process; raise ConfigError if another evaluation writes into it.

    The system frees the lock when the process ends, even after a crash.
    """
    with convert_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("ab")
    with file:
        try:
            # Lock by flock, not by the file's existence: the lock cannot outlive the process.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"--output {folder}: another evaluation is writing there. Wait until it ends, or choose another "
                "--output."
            ) from error
        except OSError as error:
            log.warning(
                "%s cannot be locked (%s): run only one evaluation there at a time.", folder, error.strerror or error
            )
        yield


class EvaluationStore:
    """Output folder opened for writing; a second evaluation in it continues after the first one's rows."""

    def __init__(self, folder: Path, settings: dict[str, Any], texts: dict[str, Any]) -> None:
        """Check and store the folder's settings; raise ConfigError with those that differ from existing rows."""
        self.folder = folder
        if (folder / SETTINGS_FILE).is_file():
            before = read_settings(folder)
            _check_same(folder, before, settings | texts)
            # The first task that reads text sets the text settings that earlier tasks left open.
            merged = before | {name: value for name, value in texts.items() if value is not None}
        else:
            _check_free(folder)
            merged = settings | texts
        write_atomically(folder / SETTINGS_FILE, f"{json.dumps(merged, indent=1, ensure_ascii=False)}\n".encode())
        self._rows = read_rows(folder)
        self._drop_cut_line()

    @property
    def done(self) -> set[Key]:
        """Samples with a stored row."""
        return set(self._rows)

    def check_texts(self, texts: Texts) -> None:
        """Raise DataError if a stored loss belongs to a different text than the one that now has its number."""
        for (task, length, index), row in self._rows.items():
            known = texts.get(length, [])[index : index + 1]
            if isinstance(row, LossRow) and known and row.document != known[0].name:
                raise DataError(
                    f"{self.folder}: text {index} of {task} at {length:,} tokens was {row.document!r}, and now is "
                    f"{known[0].name!r}: the text folder has changed. Choose another --output."
                )

    def add(self, rows: list[ScoreRow | LossRow]) -> None:
        """Append rows and sync them to disk."""
        lines = "".join(encode_row(row) for row in rows)
        with convert_write_errors(self.folder / RESULTS_FILE), (self.folder / RESULTS_FILE).open("ab") as file:
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())
        self._rows.update({(row.task, row.length, row.index): row for row in rows})

    def _drop_cut_line(self) -> None:
        """Remove an incomplete line left by a killed process."""
        path = self.folder / RESULTS_FILE
        if path.is_file() and path.stat().st_size > whole_bytes(path):
            with convert_write_errors(path):
                os.truncate(path, whole_bytes(path))


def _check_free(folder: Path) -> None:
    """Raise DataError if the folder has rows without settings."""
    if (folder / RESULTS_FILE).exists():
        raise DataError(
            f"{folder} holds a {RESULTS_FILE} without its {SETTINGS_FILE}, so its rows cannot be identified. Choose "
            "another --output."
        )


def _check_same(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ConfigError with one line per setting that differs."""
    lines = []
    for name, value in now.items():
        if name in _MAY_DIFFER or before.get(name) == value:
            continue
        # A task that reads no text does not depend on the other tasks' text.
        if name in ("haystack", "text_folder") and None in (value, before.get(name)):
            continue
        lines.append(f"  {name}: stored {before.get(name)!r}, requested {value!r}")
    if lines:
        raise ConfigError(
            f"--output {folder} holds an evaluation with other settings:\n"
            + "\n".join(lines)
            + "\nUse the same settings to continue it, or another --output. Tasks, lengths and samples may differ."
        )

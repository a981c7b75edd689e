"""The writers of a run's records: ``metrics.jsonl``, TensorBoard, the console."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from launcher.metrics.console import console_line
from launcher.metrics.expert_history import shortened
from launcher.metrics.record import METRICS_FILE, Record, check_record, encode, settle
from launcher.metrics.tensorboard import check_tensorboard, open_tensorboard, scalars

log = logging.getLogger(__name__)


class MetricsWriter:
    """Appends records to a run folder's ``metrics.jsonl`` (flushed line by line) and to its TensorBoard folder.

    One writer a run, on rank 0. Opening sets aside a torn last line, so a new record never joins it.
    """

    def __init__(self, folder: Path | str, *, tensorboard: bool = True) -> None:
        if tensorboard:
            check_tensorboard()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        settle(folder, last_step=None)
        self._tensorboard = None
        if tensorboard:
            self._tensorboard = open_tensorboard(folder)
        self._file = (folder / METRICS_FILE).open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; ``time`` is added where it is missing. ValueError when a required key is."""
        if "time" not in record:
            record = {**record, "time": timestamp()}
        check_record(record)
        record = shortened(record)
        self._file.write(encode(record) + "\n")
        # Line by line: a killed run loses no step that it has taken. TensorBoard's curves can be drawn again.
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


@dataclasses.dataclass
class RecordWriter:
    """Writes records to the run folder and the console on rank 0; does nothing on the others."""

    writer: MetricsWriter | None
    total_steps: int

    @classmethod
    def of_run(cls, folder: Path, total_steps: int, *, is_rank_0: bool) -> RecordWriter:
        """The writer of this process."""
        writer = None
        if is_rank_0:
            writer = MetricsWriter(folder)
        return cls(writer, total_steps)

    def write(self, record: Record) -> None:
        """Write a record everywhere."""
        if self.writer is not None:
            self.writer.write(record)
            log.info(console_line(record, self.total_steps))

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.writer is not None:
            self.writer.close()

"""Writers for a run's records: ``metrics.jsonl``, console, trackers."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher.metrics.expert_load import compact_record
from launcher.metrics.goodput.live import RunTime
from launcher.metrics.metrics_console import EtaEstimator, LiveLine, can_resample, console_line
from launcher.metrics.record import METRICS_FILE, Record, check_record, encode, truncate_after
from launcher.metrics.trackers.tracker_threads import Trackers
from launcher.wording import ON_TERMINAL
from parallel.runtime.activity import begin

log = logging.getLogger(__name__)


class MetricsWriter:
    """Writer that appends records to a run folder's ``metrics.jsonl``, flushed line by line.

    One writer per run, on rank 0. Opening moves a torn last line away, so a new record never joins it.
    """

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        truncate_after(folder, None)
        self._path = folder / METRICS_FILE
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> Record:
        """Append one record and return it as written; add ``time`` if it is missing.

        Raise ValueError if a required key is missing, OSError if the line cannot be written to disk.
        """
        if "time" not in record:
            # ISO 8601: UTC, milliseconds.
            record = {**record, "time": datetime.now(UTC).isoformat(timespec="milliseconds")}
        check_record(record)
        record = compact_record(record)
        # The system accepts writes to a deleted file, but they would be lost.
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise OSError(errno.ESTALE, "the run's metrics file was removed", str(self._path))
        self._file.write(encode(record) + "\n")
        # Line by line: a killed run loses no completed step.
        self._file.flush()
        return record

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._file.close()


@dataclass(frozen=True, kw_only=True)
class LogSchedule:
    """Rule for the steps that get a log line."""

    total_steps: int
    """Total steps in the run."""
    first_step: int
    """Step after which this process begins."""
    last_step: int
    """Last step in this process."""
    every: int
    """Log interval in steps."""

    def is_due(self, record: Mapping[str, Any]) -> bool:
        """Return True if the record gets a line; validations, resumes, and the first and last step always do."""
        step = record["step"]
        # These events log their own lines.
        if record.get("event") in ("plan", "plan_checked", "stop"):
            return False
        # The record of a step that could not be taken has no tokens: it explains why the run ends.
        if record["kind"] != "train" or record.get("tokens") is None:
            return True
        return step % self.every == 0 or step in (self.first_step + 1, self.last_step)


class RecordWriter:
    """Writer to the run folder, log, console and trackers on rank 0; a no-op on other ranks."""

    def __init__(self, folder: Path, lines: LogSchedule, *, is_rank_0: bool, trackers: Trackers | None = None) -> None:
        self._lines, self._trackers = lines, trackers or Trackers()
        self._eta = EtaEstimator(lines.first_step, time.monotonic())
        self._writer = None
        self._time = None
        if is_rank_0:
            self._writer = MetricsWriter(folder)
            self._time = RunTime(folder, step=lines.first_step)
        self._can_resample = is_rank_0 and can_resample(sys.stdout)
        self._live = LiveLine(lines.total_steps, is_shown=self._can_resample)

    def write(self, record: Record) -> None:
        """Write a record to all outputs, but to the log only if a line is due."""
        if self._writer is None or self._time is None:
            return
        # Add the goodput fields first: file, console and trackers get the same record.
        record = {**record, **self._time.see(record)}
        written = self._writer.write(record)
        left = self._eta.seconds_left(record["step"], self._lines.last_step, time.monotonic())
        if self._lines.is_due(record):
            self._log(record, left)
        if record["kind"] == "train":
            self._live.update(record, seconds_left=left)
        self._trackers.send(written)

    def _log(self, record: Record, seconds_left: float | None) -> None:
        """Log a record's line: complete in the file, fitted to the terminal's width on screen."""
        total, on_terminal = self._lines.total_steps, {}
        if self._can_resample:
            columns = shutil.get_terminal_size().columns
            on_terminal[ON_TERMINAL] = console_line(record, total, seconds_left=seconds_left, columns=columns)
        log.info("%s", console_line(record, total, seconds_left=seconds_left), extra=on_terminal)

    def set_activity(self, activity: str) -> None:
        """Report the activity between two steps, such as "saving", on the live line and to the watchdog."""
        saving = activity.startswith("saving")
        begin(activity, disk=saving)
        self._live.say(activity)
        if self._time is not None:
            self._time.begin("saving" if saving else "validating")

    def __enter__(self) -> RecordWriter:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        # Return the terminal to the log before the last lines.
        self._live.stop()
        if self._time is not None:
            if summary := self._time.end(failed=kind is not None):
                log.info("%s", summary)
            self._trackers.close(self._time.how)
        if self._writer is not None:
            self._writer.close()

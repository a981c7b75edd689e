"""The tracker's side: ``python -m launcher.metrics.trackers.process NAME PID`` reads a run's lines and hands them on.

A process of its own: what a tracker imports, waits for, leaks or crashes with never reaches training. It ends when the
trainer does, for whatever reason: then its standard input has an end.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from launcher.metrics.trackers.start import Start, Tracker, without_secrets

log = logging.getLogger(__name__)

FINISH_SECONDS = 60.0
"""How long what is left may take to send once the run has ended."""


def opener(name: str) -> Callable[[Start], Tracker]:
    """How a tracker is opened; it is imported here, and nothing else is."""
    if name == "wandb":
        from launcher.metrics.trackers.to_wandb import open_tracker
    elif name == "trackio":
        from launcher.metrics.trackers.to_trackio import open_tracker
    elif name == "mlflow":
        from launcher.metrics.trackers.to_mlflow import open_tracker
    else:
        raise ValueError(f"no tracker is called {name!r}")
    return open_tracker


def follow(lines: Iterable[str], open_tracker: Callable[[Start], Tracker]) -> None:
    """Hand on the lines of one attempt, until there are no more; without a last word it was killed."""
    numbered = iter(lines)
    start = json.loads(next(numbered))
    tracker = open_tracker(Start(**{**start, "folder": Path(start["folder"])}))
    how = "failed"
    for text in numbered:
        line: dict[str, Any] = json.loads(text)
        if "end" in line:
            how = line["end"]
        elif "text" in line:
            tracker.text(line["step"], line["name"], line["text"])
        else:
            # NaN and infinities are no JSON: the trainer writes them as text.
            values = {key: float(value) for key, value in line["metrics"].items()}
            tracker.metrics(line["step"], values, line["time"])
    tracker.finish(how)


def end_after_trainer(trainer: int, seconds: float) -> None:
    """End this process so long after the trainer's, whatever it waits for: nothing of a run is left behind."""

    def end() -> None:
        # A process without its parent gets another one.
        while os.getppid() == trainer:
            time.sleep(0.5)
        time.sleep(seconds)
        log.warning("Not all was sent within %.0f s.", seconds)
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


class _WithoutSecrets(io.TextIOBase):
    """A stream whose text passes ``without_secrets``: what a tracker prints, or raises, may have a password in it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        self._stream.write(without_secrets(text))
        self._stream.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()


def main(name: str, trainer: int) -> int:
    """Follow the run at standard input, which the process ``trainer`` writes to; returns the exit code."""
    end_after_trainer(trainer, FINISH_SECONDS)
    # Where cores are short, training comes first.
    os.nice(10)
    # Signals mean the training, which says by its last line, or by none, how it ended.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    sys.stdout, sys.stderr = _WithoutSecrets(sys.stdout), _WithoutSecrets(sys.stderr)
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # A run's settings are nobody's statistics.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        follow(sys.stdin, opener(name))
    except Exception:
        log.exception("the tracker has failed")
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1], int(sys.argv[2]))
    sys.stdout.flush()
    # Not sys.exit: a tracker may have left threads that never end.
    os._exit(code)

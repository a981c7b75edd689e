"""What every verb writes with: results on standard output; progress, notes and warnings on standard error.

Imports nothing heavy, because ``--help`` waits for it.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar

_SECONDS_BETWEEN_LINES = 10.0
_BINARY_PREFIXES = ("B", "KiB", "MiB", "GiB", "TiB")

Result = TypeVar("Result")


# ---------------------------------------------------------------------------------------------------------- results


def program() -> str:
    """How the user called us, for commands that we tell them to type."""
    return "longctx" if Path(sys.argv[0]).name == "longctx" else "python -m launcher"


def command(*words: object) -> str:
    """A command line to copy: our name and ``words``, quoted where a shell needs it."""
    return f"{program()} {shlex.join(str(word) for word in words)}"


def say(text: str) -> None:
    """Write a line of the result to standard output."""
    _write(sys.stdout, f"{text}\n")


def say_json(value: Any) -> None:
    """Write a result for machines; paths become strings."""
    say(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def note(text: str) -> None:
    """Write a line for people to standard error, above a progress bar if there is one."""
    _write(sys.stderr, f"{text}\n")


def flush_results() -> None:
    """Write out what others (argparse) have put on standard output."""
    _write(sys.stdout, "")


def _write(stream: TextIO, text: str) -> None:
    """Write at once. When the reader has gone (``| head``), the rest goes nowhere; the exit code stays the verb's."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, two spaces apart: the first to the left, numbers to the right; nothing is cut or wrapped."""
    lines = [list(headings), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    right = [bool(rows) and all(row[i][:1].isdigit() or row[i] == "–" for row in rows) for i in range(len(headings))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def plural(count: int, thing: str) -> str:
    """``1 shard``, ``2 shards``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def human_bytes(count: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    for prefix in _BINARY_PREFIXES[:-1]:
        if count < 1024:
            return f"{count:.0f} {prefix}" if prefix == "B" else f"{count:.1f} {prefix}"
        count /= 1024
    return f"{count:.1f} {_BINARY_PREFIXES[-1]}"


# --------------------------------------------------------------------------------------------------------- progress


class Update(Protocol):
    """What a piece of work calls as it goes on; absent arguments leave things as they are."""

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None: ...


@contextmanager
def progress(label: str, *, total: int | None = None) -> Iterator[Update]:
    """Shows that work goes on: a bar on a terminal, otherwise a line now and then.

    ``done`` beyond ``total`` means that the total was only a guess: the bar then shows activity alone.
    """
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        note(f"{label} …")
        yield _Lines(label, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(show_speed=False),
        TextColumn("{task.fields[note]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total, note="")

        def update(done: int, total: int | None = None, note: str = "") -> None:
            known = total if total is not None else bar.tasks[0].total
            guessed_low = known is not None and done > known
            if guessed_low:
                bar.tasks[0].total = None  # update() cannot take a total away again
            bar.update(task, completed=done, total=None if guessed_low else total, note=note)

        yield update


class _Lines:
    """Progress where there is no terminal: a line every ten seconds."""

    def __init__(self, label: str, total: int | None) -> None:
        self._label, self._total = label, total
        self._due = time.monotonic() + _SECONDS_BETWEEN_LINES

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None:
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _SECONDS_BETWEEN_LINES
        whole = total or self._total
        share = f" {100 * done // whole}%" if whole and done <= whole else ""
        _write(sys.stderr, f"{self._label}:{share} {note}".rstrip() + "\n")


def interruptible(action: Callable[[], Result]) -> Result:
    """Run ``action`` in a thread, so that Ctrl-C is heard at once while it computes outside of Python.

    After Ctrl-C the thread is left to itself; ``main`` then ends the process without waiting for it.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(action())
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)

    worker = threading.Thread(target=work, name=ABANDONED, daemon=True)
    worker.start()
    while worker.is_alive():
        worker.join(0.1)
    if errors:
        raise errors[0]
    return results[0]


ABANDONED = "longctx-worker"
"""Name of ``interruptible``'s threads."""


def has_abandoned_work() -> bool:
    """Whether a thread of ``interruptible`` still runs."""
    return any(thread.name == ABANDONED for thread in threading.enumerate())


# ---------------------------------------------------------------------------------------------------------- logging


@contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """Within the block, warnings of any package are lines on standard error, without disturbing a progress bar.

    What ``guard`` logs is left out: it has told the user already.
    """
    handler = _NoteHandler(logging.WARNING)
    handler.addFilter(lambda record: record.name != "launcher.cluster.exit")
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


class _NoteHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(f"{record.levelname.lower()}: {record.getMessage()}")

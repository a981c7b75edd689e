"""Console output for all verbs: results on standard output; progress, notes and warnings on standard error.

This file has no heavy imports, because ``--help`` waits for it.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import os
import re
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Protocol, TextIO, TypeVar

from tyro.conf import arg

from launcher.cluster.exit import is_for_console
from launcher.wording import short_duration
from longctx.errors import ConfigError
from longctx.untrusted.terminal import escape_control_characters, for_terminal

Result = TypeVar("Result")
Json = Annotated[bool, arg(help="Print JSON instead of a table.")]
"""Option shared by all verbs that print a table."""


# ---------------------------------------------------------------------------------------------------------- results


def program() -> str:
    """Return how the user called this program, for suggested commands: it worked once, so it works again."""
    script = Path(sys.argv[0])
    if script.name == "longctx":
        # The bare name works if the PATH leads to this script.
        on_path = shutil.which("longctx")
        if on_path is not None and script.exists() and script.samefile(on_path):
            return "longctx"
        return shlex.quote(str(script))
    if sys.orig_argv[1:3] == ["-m", "launcher"]:
        return f"{shlex.quote(sys.orig_argv[0])} -m launcher"
    return "python -m launcher"


def command_line(*words: object) -> str:
    """Return a command line to copy: this program and ``words``, shell-quoted if necessary."""
    return f"{program()} {shlex.join(str(word) for word in words)}"


def print_line(text: str) -> None:
    """Write a result line to standard output."""
    _write(sys.stdout, f"{text}\n")


def write(text: str) -> None:
    """Write part of a result line to standard output."""
    _write(sys.stdout, text)


def print_json(value: Any) -> None:
    """Write a machine-readable result; paths become strings."""
    print_line(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def note(text: str) -> None:
    """Write a line for people to standard error, above any progress bar."""
    _write(sys.stderr, f"{text}\n")


def read_line(prompt: str) -> str | None:
    """Read a line from standard input without its line end; None at the end. A terminal shows the prompt.

    Raise ConfigError if the line is not UTF-8.
    """
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            # Lets users edit lines and recall earlier ones.
            with suppress(ImportError):
                import readline  # noqa: F401
            return input(prompt)
        if sys.stdin.isatty():
            _write(sys.stderr, prompt)
        line = sys.stdin.buffer.readline().decode()
    except EOFError:
        note("")
        return None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"a line of standard input is not UTF-8 at byte {error.start:,}. Convert it first: iconv -t utf-8."
        ) from error
    return line.rstrip("\r\n") if line else None


def _write(stream: TextIO, text: str) -> None:
    """Write and flush. If the reader has gone (``| head``), drop the rest; the exit code stays the verb's."""
    try:
        stream.write(for_terminal(text, stream))
        stream.flush()
    except BrokenPipeError:
        # Python would fail again when it closes the stream at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def unframed(box: str) -> str:
    """Flatten tyro's boxed message into one line without frame, colors and per-option help."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    # Skip the title. The frame is two columns wide, drawn in ASCII if the terminal lacks UTF-8.
    lines = [line[2:].rstrip(" │╯") for line in plain.splitlines()[1:]]
    parts: list[str] = []
    for is_rule, block in itertools.groupby(lines, key=lambda line: bool(re.fullmatch("[─-]+", line))):
        # tyro indents an option by four columns below the message about it, and its help text by eight.
        first_paragraph = [line for line in itertools.takewhile(bool, block) if not line.startswith(" " * 8)]
        message = " ".join(line for line in first_paragraph if not line.startswith(" "))
        options = ", ".join(line.strip(" •") for line in first_paragraph if line.startswith(" "))
        if message and not is_rule and not message.startswith(("For full helptext", "Argument helptext")):
            parts.append(f"{message} {options}".strip())
    # A line may be wrapped before its full stop.
    return "; ".join(parts).replace(" .", ".")


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns two spaces apart, text to the left and numbers to the right, without truncation or wrapping."""
    columns: list[list[str]] = []
    for index, header in enumerate(headers):
        column = [row[index] for row in rows]
        # Right-align numbers and their heading; some numbers may be unknown.
        pad = str.ljust
        if column and all(cell[:1].isdigit() or cell == "–" for cell in column):
            pad = str.rjust
        column.insert(0, header)
        width = max(len(cell) for cell in column)
        columns.append([pad(cell, width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def human_bytes(count: float) -> str:
    """Format ``1536`` as ``1.5 KiB``."""
    if count < 1024:
        return f"{count:.0f} B"
    for prefix in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {prefix}"
    return f"{count / 1024:.1f} TiB"


# --------------------------------------------------------------------------------------------------------- progress


class Update(Protocol):
    """Callback for progress updates; omitted arguments keep their values.

    ``amount`` is for the rate if it differs from ``done``: for example, text when ``done`` counts
    compressed bytes.
    """

    def __call__(self, done: int, total: int | None = None, note: str = "", amount: int | None = None) -> None: ...


def byte_rate(per_second: float) -> str:
    """Format a rate as ``4.1 MiB/s``."""
    return f"{human_bytes(per_second)}/s"


class ProgressRate:
    """Speed and remaining time, measured from the first report."""

    def __init__(self, rate: Callable[[float], str] | None) -> None:
        """Start without reports. ``rate`` formats an amount per second; without it ``text`` is empty."""
        self._rate = rate
        self._first: tuple[float, int, int] | None = None

    def text(self, done: int, total: float | None, now: float, amount: int | None = None) -> str:
        """Format as ``4.1 MiB/s, 2 min left``; empty during the first second."""
        if amount is None:
            amount = done
        # Counted from the first report: work taken over from an earlier attempt must not raise the rate.
        if self._first is None:
            self._first = now, done, amount
        started, done_before, amount_before = self._first
        seconds = now - started
        if self._rate is None or seconds < 1 or done <= done_before:
            return ""
        text = self._rate((amount - amount_before) / seconds)
        if total is not None and done < total:
            text += f", {short_duration(seconds * (total - done) / (done - done_before))} left"
        return text


@contextmanager
def progress(
    label: str,
    *,
    total: int | None = None,
    rate: Callable[[float], str] | None = None,
    seconds_between_lines: float = 10.0,
) -> Iterator[Update]:
    """Show progress: a bar on a terminal, otherwise a line every ``seconds_between_lines``.

    ``total`` may be a guess: once ``done`` exceeds it, the bar shows only activity. With ``rate``, which formats an
    amount per second, speed and remaining time are shown too.
    """
    progress_rate = ProgressRate(rate)
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        note(f"{label} …")
        yield _Lines(label, total, progress_rate, seconds_between_lines)
        return
    # Deferred: importing rich takes longer than running a short verb.
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
        task = bar.add_task(escape_control_characters(label), total=total, note="")

        def update(done: int, total: int | None = None, note: str = "", amount: int | None = None) -> None:
            known = bar.tasks[0].total
            if total is not None:
                known = total
            if known is not None and done > known:
                # The guess was too low. update() reads None as "unchanged", so clear the total directly.
                bar.tasks[0].total = total = known = None
            parts = [part for part in (note, progress_rate.text(done, known, time.monotonic(), amount)) if part]
            bar.update(task, completed=done, total=total, note=escape_control_characters(", ".join(parts)))

        yield update


class _Lines:
    """Progress without a terminal: one line per interval."""

    def __init__(self, label: str, total: int | None, progress_rate: ProgressRate, seconds: float) -> None:
        self._label, self._total, self._progress_rate, self._seconds = label, total, progress_rate, seconds
        self._due = time.monotonic() + seconds

    def __call__(self, done: int, total: int | None = None, note: str = "", amount: int | None = None) -> None:
        now = time.monotonic()
        whole = total or self._total
        speed = self._progress_rate.text(done, whole, now, amount)
        if now < self._due:
            return
        self._due = now + self._seconds
        share = ""
        if whole and done <= whole:
            share = f" {100 * done // whole}%"
        parts = [part for part in (note, speed) if part]
        _write(sys.stderr, f"{self._label}:{share} {', '.join(parts)}".rstrip() + "\n")


# CPython runs signal handlers only in the main thread, between bytecodes, so a long native call there would delay
# Ctrl-C. The work therefore runs in a thread, and the main thread only waits. On Ctrl-C it raises KeyboardInterrupt in
# the worker, which takes effect at the worker's next bytecode.
def interruptible(action: Callable[[], Result]) -> Result:
    """Call ``action`` in a thread, so that Ctrl-C works at once even during native computation.

    If the thread runs Python, Ctrl-C ends it too, and it removes unfinished files. Otherwise it is abandoned: it writes
    no files at that point, and ``main`` ends the process without waiting for it.
    """
    results: list[Result] = []
    errors: list[BaseException] = []
    done_event = threading.Event()

    def work() -> None:
        try:
            results.append(action())
        except BaseException as error:
            # Re-raised in the caller's thread.
            errors.append(error)
        finally:
            threading.current_thread().name = "longctx-ended"
            done_event.set()

    worker = threading.Thread(target=work, name=ABANDONED, daemon=True)
    # Without a timeout, Ctrl-C would go unnoticed. join() does not work: after an interrupt it treats the thread as
    # finished (Python 3.11).
    try:
        # start() waits for the thread, which may already be running when Ctrl-C arrives.
        worker.start()
        while not done_event.wait(0.1):
            pass
    except KeyboardInterrupt:
        if worker.ident is not None:
            interrupt = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident), interrupt)
        done_event.wait(_CLEANING_SECONDS)
        raise
    if errors:
        raise errors[0]
    return results[0]


_CLEANING_SECONDS = 1.0
"""Time that Ctrl-C waits for a thread that may be in native code."""
ABANDONED = "longctx-worker"
"""Name of ``interruptible``'s threads while they run."""


def has_abandoned_work() -> bool:
    """Return True if a thread started by ``interruptible`` is still running."""
    return any(thread.name == ABANDONED for thread in threading.enumerate())


# ---------------------------------------------------------------------------------------------------------- logging


@contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """Print all packages' warnings to standard error within the ``with`` block, without disturbing a progress bar.

    The error that ends a command is left out: it is printed separately.
    """
    handler = _NoteHandler(logging.WARNING)
    handler.addFilter(is_for_console)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


class _NoteHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(f"{record.levelname.lower()}: {record.getMessage()}")

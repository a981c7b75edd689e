"""A process's last two actions: report the reason, and end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from longctx.untrusted.terminal import escape_control_characters
from parallel.runtime.launcher_processes import PDSH, Launcher, is_started_by_init, launcher_above

_LAUNCHER_SECONDS = 15.0
"""How long the message waits for the launcher to end. The launcher polls its ranks once a second."""
_SPEAKER_SECONDS = 5.0


@dataclass(frozen=True)
class _Terminal:
    """Terminal of the user's command, with pdsh and ssh between it and this process."""

    stream: int
    pdsh: int


# One per process, like standard error.
_terminal: _Terminal | None = None


def use_terminal_of_user(chain: Sequence[Launcher]) -> None:
    """Report on the user's terminal if pdsh on this machine started this rank: pdsh may have ended by then."""
    global _terminal
    pdsh = next((launcher for launcher in chain if launcher.label == PDSH), None)
    if pdsh is None or _terminal is not None:
        return
    runner = chain[-1].process.pid
    # The system refuses for another user's process and for a socket: then use standard error.
    with contextlib.suppress(OSError):
        stream = os.open(f"/proc/{runner}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
        _terminal = _Terminal(stream, pdsh.process.pid)


def print_last_message(text: str) -> None:
    """Write to standard error, below any progress bar; do nothing if ``text`` is empty.

    If a launcher started this process, it prints first and ends, so that the user reads ``text`` last. In a container
    created for this run, processes end with the launcher, so ``text`` comes first.
    """
    if not text:
        return
    # An interrupted progress bar leaves the cursor hidden.
    show_cursor = ""
    if sys.stderr.isatty():
        show_cursor = "\x1b[?25h"
    words = f"{show_cursor}\n{escape_control_characters(text)}\n\n"
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
        if not _say_after_launcher(words):
            sys.stderr.write(words)
            sys.stderr.flush()


def end_process(code: int) -> NoReturn:
    """End this process immediately, whatever other threads and devices do; flush written output."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    # Log files flush after each line. Skip exit handlers: they may wait for a stuck thread.
    os._exit(code)


def _say_after_launcher(words: str) -> bool:
    """Start a process that prints the message later; return True if it started."""
    launcher = launcher_above()
    if launcher is not None and launcher.is_ours:
        return False
    # A stream without a descriptor belongs to a test.
    if (launcher is None and _terminal is None) or sys.stderr is not sys.__stderr__:
        return False
    # In a container all processes end with the launcher, so a process that waits for that end never prints.
    if is_started_by_init(sys.argv[0]):
        return False
    printer = str(Path(__file__).with_name("last_message_printer.py"))
    processes, stream = [], None
    if launcher is not None:
        processes.append(launcher.process.pid)
    if _terminal is not None:
        processes.append(_terminal.pdsh)
        # Do not inherit this process's stream: ssh waits for all processes that hold it, and pdsh for ssh.
        stream = _terminal.stream
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", printer, str(_LAUNCHER_SECONDS), *map(str, processes)],
            input=words.encode(errors="replace"),
            stdout=subprocess.DEVNULL,
            stderr=stream,
            timeout=_SPEAKER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        # Out of memory or process slots, which may be why this one ends.
        return False
    return done.returncode == 0

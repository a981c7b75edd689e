"""The last two things that a process does: say why, and end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from longctx.untrusted.terminal import spelled
from parallel.runtime.parents import PDSH, Launcher, is_begun_by_process_1, launcher_above

_LAUNCHER_SECONDS = 15.0
"""How long words wait for the launcher to end. It looks at its ranks once a second."""
_SPEAKER_SECONDS = 5.0


@dataclass(frozen=True)
class _Terminal:
    """Where the user has typed the command, with pdsh and ssh between it and this process."""

    stream: int
    pdsh: int


# One in a process, as standard error is.
_terminal: _Terminal | None = None


def speak_where_typed(launchers: Sequence[Launcher]) -> None:
    """Say last words there, where pdsh on this machine started this rank: it may be gone by then, and ssh with it."""
    global _terminal
    pdsh = next((launcher for launcher in launchers if launcher.what == PDSH), None)
    if pdsh is None or _terminal is not None:
        return
    runner = launchers[-1].process.pid
    # Of another user's process the system refuses it, and of a socket: then words go the usual way.
    with contextlib.suppress(OSError):
        stream = os.open(f"/proc/{runner}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
        _terminal = _Terminal(stream, pdsh.process.pid)


def say(text: str) -> None:
    """Write to standard error, below whatever a progress bar has left there; nothing where ``text`` is empty.

    Where a launcher started this process, that speaks first and ends: what a user reads last is ``text``. In a
    container that was made for this run nobody speaks after the launcher, so ``text`` comes first.
    """
    if not text:
        return
    # A progress bar that is cut off has hidden it.
    show_cursor = ""
    if sys.stderr.isatty():
        show_cursor = "\x1b[?25h"
    words = f"{show_cursor}\n{spelled(text)}\n\n"
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
        if not _say_after_launcher(words):
            sys.stderr.write(words)
            sys.stderr.flush()


def end_process(code: int) -> NoReturn:
    """End this process at once, whatever other threads and devices do; what was written is flushed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    # Log files flush after each line. Exit handlers are left out: they may wait for a thread that is stuck.
    os._exit(code)


def _say_after_launcher(words: str) -> bool:
    """Whether a process was started that says it later."""
    launcher = launcher_above()
    # A stream without a descriptor is a test's.
    if (launcher is None and _terminal is None) or sys.stderr is not sys.__stderr__:
        return False
    # In a container the launcher's end is everybody's end: who waits for it never speaks.
    if is_begun_by_process_1(sys.argv[0]):
        return False
    speaker = str(Path(__file__).with_name("speaker.py"))
    processes, stream = [], None
    if launcher is not None:
        processes.append(launcher.process.pid)
    if _terminal is not None:
        processes.append(_terminal.pdsh)
        # Not the stream of this process beside it: ssh waits for all who hold it, and pdsh for ssh.
        stream = _terminal.stream
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", speaker, str(_LAUNCHER_SECONDS), *map(str, processes)],
            input=words.encode(errors="replace"),
            stdout=subprocess.DEVNULL,
            stderr=stream,
            timeout=_SPEAKER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        # No memory, or no more processes: that may be why this one ends.
        return False
    return done.returncode == 0

"""The last two things that a process does: say why, and end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from parallel.runtime.parents import launcher_above

_LAUNCHER_SECONDS = 15.0
"""How long words wait for the launcher to end. It looks at its ranks once a second."""
_SPEAKER_SECONDS = 5.0


def say(text: str) -> None:
    """Write to standard error, below whatever a progress bar has left there; nothing where ``text`` is empty.

    Where a launcher started this process, that speaks first and ends: what a user reads last is ``text``.
    """
    if not text:
        return
    # A progress bar that is cut off has hidden it.
    show_cursor = ""
    if sys.stderr.isatty():
        show_cursor = "\x1b[?25h"
    words = f"{show_cursor}\n{text}\n\n"
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
    if launcher is None or sys.stderr is not sys.__stderr__:
        return False
    speaker = str(Path(__file__).with_name("speaker.py"))
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", speaker, str(launcher.process.pid), str(_LAUNCHER_SECONDS)],
            input=words.encode(errors="replace"),
            stdout=subprocess.DEVNULL,
            timeout=_SPEAKER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        # No memory, or no more processes: that may be why this one ends.
        return False
    return done.returncode == 0

"""The last two things that a process does: say why, and end."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn


def say(text: str) -> None:
    """Write to standard error, below whatever a progress bar has left there; nothing where ``text`` is empty."""
    if not text:
        return
    # A progress bar that is cut off has hidden it.
    show_cursor = ""
    if sys.stderr.isatty():
        show_cursor = "\x1b[?25h"
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{show_cursor}\n{text}\n\n")
        sys.stderr.flush()


def end_process(code: int) -> NoReturn:
    """End this process at once, whatever other threads and devices do; what was written is flushed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    # Log files flush after each line. Exit handlers are left out: they may wait for a thread that is stuck.
    os._exit(code)

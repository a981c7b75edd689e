"""Python stacks for all threads in this process, captured by a separate thread, whatever the others do."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

_WAITING = ("collective.py", "communicator.py")
"""Files in ``parallel/comm`` that wait on behalf of their callers."""
_PACKAGES = ("launcher", "parallel", "data_pipeline", "longctx")
_ROOT = Path(__file__).parents[3]
PREFIX = "stacks_rank_"
"""File name prefix; the rank follows."""


def format_stack_traces() -> str:
    """Return all threads' stacks, the main thread's first."""
    frames, main = sys._current_frames(), threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident in sorted(frames, key=lambda ident: (ident != main, ident)):
        # Skip the capturing thread.
        if ident == threading.get_ident():
            continue
        parts.append(f"Thread {names.get(ident, ident)}, innermost call last:\n")
        parts.extend(traceback.format_stack(frames[ident]))
        parts.append("\n")
    return "".join(parts)


def place_of_main() -> str:
    """Return the main thread's position in our code: ``parallel/transport/ring_exchange.py:38 in wait``."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        with contextlib.suppress(ValueError):
            inside = file.relative_to(_ROOT)
            # A function that waits for its caller is less informative than the caller.
            if inside.parts[0] in _PACKAGES and inside.name not in _WAITING and frame.f_code.co_name != "<lambda>":
                return f"{inside}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def stack_trace_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's stack file."""
    return folder / f"{PREFIX}{rank}.txt"


def write_stack_traces(folder: Path | None, rank: int, line: str) -> Path | None:
    """Write ``line`` and the stacks to a file in ``folder``; return its path, or None on failure. Never raise."""
    if folder is None:
        return None
    path = stack_trace_path(folder, rank)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        # Atomic: the rank that reports for rank 0 reads the others' files.
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(f"rank {rank}: {line}\n\n{format_stack_traces()}")
        partial.replace(path)
        return path
    return None

"""One attempt: run the command in its own session, forward signals to it, and leave none of its processes behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

import psutil

from longctx.errors import LongCtxError

HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that mean the training, and not who supervises it."""
_RANK = "RANK"
"""The variable by which every launcher tells a rank its number."""
_POLL_SECONDS = 0.2
_LEAVE_SECONDS = 120.0
"""How long what is left of an attempt has to end by itself, once it was told to: ranks save before they do."""


@dataclass(frozen=True)
class Ending:
    """End of an attempt."""

    code: int
    """The command's exit code; 128 and the signal's number where one ended it."""
    seconds: float
    left_behind: int
    """Processes that it had not ended itself, and that were ended in its place."""


class Stop:
    """Stop request of a user or a scheduler: the first signal, which ends the running attempt."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The first one that came."""
        self._session = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Forward signals to the running attempt while this context is active."""
        before = {number: signal.signal(number, self._hear) for number in HANDED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def meaning(self, session: int) -> Iterator[None]:
        """Forward signals to the processes of this session while this context is active."""
        self._session = session
        if self.signal is not None:
            # The signal came before there was an attempt to forward it to.
            self._hand_on(self.signal)
        try:
            yield
        finally:
            self._session = 0

    def wait(self, seconds: float) -> bool:
        """Sleep for ``seconds`` or until a signal comes; return True if one came before or meanwhile."""
        end = time.monotonic() + seconds
        while self.signal is None and time.monotonic() < end:
            time.sleep(min(_POLL_SECONDS, max(end - time.monotonic(), 0.0)))
        return self.signal is not None

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            # A second request: the user does not want to wait.
            number = signal.SIGKILL
        else:
            self.signal = signal.Signals(number)
        if self._session:
            self._hand_on(number)

    def _hand_on(self, number: int) -> None:
        members = _members(self._session)
        # Only to the ranks, if they run here: they save, and their launchers end when they do. A launcher that gets
        # Ctrl-C as well prints a traceback, and one that gets SIGTERM kills its ranks half a minute later.
        if number != signal.SIGKILL:
            members = _ranks(members) or members
        for process in members:
            _send(process, number)


def attempt(words: Sequence[str], stop: Stop) -> Ending:
    """Run a command to its end, with output to our own streams. Raise LongCtxError if it cannot be started."""
    began = time.monotonic()
    try:
        # Its own session: a terminal's Ctrl-C reaches only this process, and all descendants can be found again.
        process = subprocess.Popen(list(words), start_new_session=True)
    except OSError as error:
        raise LongCtxError(f"{words[0]} cannot be started: {error.strerror}.\nIs the environment active?") from error
    with stop.meaning(process.pid):
        code = process.wait()
    left = _end_all(process.pid)
    if code < 0:
        code = 128 - code
    return Ending(code, time.monotonic() - began, left)


def _members(session: int) -> list[psutil.Process]:
    """Return the running processes of a session, including its first one."""
    found = []
    for number in psutil.pids():
        try:
            process = psutil.Process(number)
            if os.getsid(number) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, PermissionError, psutil.Error):
            # It has ended meanwhile, or is not ours.
            continue
    return found


def _ranks(members: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the processes to which a launcher has given a rank; none if that cannot be determined."""
    # Descendants of a rank inherit the variable, and so does this process if a rank started it.
    if _RANK in os.environ:
        return []
    parents: dict[int, int] = {}
    for process in members:
        # It may have ended meanwhile.
        with suppress(OSError, psutil.Error):
            if _RANK in process.environ():
                parents[process.pid] = process.ppid()
    return [process for process in members if process.pid in parents and parents[process.pid] not in parents]


def _end_all(session: int) -> int:
    """End the remaining processes of a session, since killed launchers leave their ranks. Return their number."""
    left = _members(session)
    for process in left:
        _send(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(left, timeout=_LEAVE_SECONDS)
    # Also processes that these started meanwhile.
    for process in {*alive, *_members(session)}:
        _send(process, signal.SIGKILL)
    return len(left)


def _send(process: psutil.Process, number: int) -> None:
    # It may have ended.
    with suppress(psutil.Error):
        process.send_signal(number)

"""Processes in sessions or groups of their own: signals reach the ranks among them, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import psutil

from longctx.errors import LongCtxError

HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that mean the training, and not who supervises it."""
_RANK = "RANK"
"""The variable by which every launcher tells a rank its number."""
_POLL_SECONDS = 0.2
_LEAVE_SECONDS = 120.0
"""How long what is left of an attempt has to end by itself, once it was told to: ranks save before they do."""


class Stop:
    """Stop request of a user or a scheduler: the first signal, which ends the running attempt."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The first one that came."""
        self._leaders: Sequence[int] = ()

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
    def meaning(self, leaders: Sequence[int]) -> Iterator[None]:
        """Forward signals to the processes of these sessions or groups while this context is active."""
        self._leaders = leaders
        if self.signal is not None:
            # The signal came before there was an attempt to forward it to.
            self._hand_on(self.signal)
        try:
            yield
        finally:
            self._leaders = ()

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
        if self._leaders:
            self._hand_on(number)

    def _hand_on(self, number: int) -> None:
        members = _members(self._leaders)
        # Only to the ranks, if they run here: they save, and their launchers end when they do. A launcher that gets
        # Ctrl-C as well prints a traceback, and one that gets SIGTERM kills its ranks half a minute later.
        if number != signal.SIGKILL:
            members = _ranks(members) or members
        for process in members:
            _send(process, number)


def _members(leaders: Sequence[int]) -> list[psutil.Process]:
    """Return the running processes of sessions or groups that these processes began, including them."""
    found = []
    for number in psutil.pids():
        try:
            process = psutil.Process(number)
            belongs = os.getsid(number) in leaders or os.getpgid(number) in leaders
            if belongs and process.status() != psutil.STATUS_ZOMBIE:
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


def end_all(leaders: Sequence[int]) -> int:
    """End what remains of sessions or groups, since killed launchers leave their ranks. Return how many that was."""
    left = _members(leaders)
    for process in left:
        _send(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(left, timeout=_LEAVE_SECONDS)
    # Also processes that these started meanwhile.
    for process in {*alive, *_members(leaders)}:
        _send(process, signal.SIGKILL)
    return len(left)


def _send(process: psutil.Process, number: int) -> None:
    # It may have ended.
    with suppress(psutil.Error):
        process.send_signal(number)


def run_command(words: Sequence[str], stop: Stop, *, own_session: bool = True) -> tuple[int, int]:
    """Run a command to its end, with output to our own streams.

    In a session of its own all descendants are found again, also those with groups of their own; otherwise it gets a
    group of this process's session, where a supervisor of this process finds it. Return its exit code (128 and the
    signal's number if one ended it), and the number of processes that it had left behind. Raise LongCtxError if it
    cannot be started.
    """
    # A terminal's Ctrl-C reaches only this process.
    apart: dict[str, Any] = {"start_new_session": True}
    if not own_session:
        apart = {"process_group": 0}
    try:
        process = subprocess.Popen(list(words), **apart)
    except OSError as error:
        raise LongCtxError(f"{words[0]} cannot be started: {error.strerror}.\nIs the environment active?") from error
    with stop.meaning([process.pid]):
        code = process.wait()
        left = end_all([process.pid])
    return (128 - code if code < 0 else code), left

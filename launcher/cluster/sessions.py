"""Processes in sessions or groups of their own: forward signals to their ranks, and leave no process behind."""

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

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals meant for the training, not for its supervisor."""
_RANK = "RANK"
"""Variable in which every launcher passes a rank its number."""
_POLL_SECONDS = 0.2
_LEAVE_SECONDS = 120.0
"""Time for an attempt's remaining processes to end after SIGTERM: ranks save first."""


class SignalForwarder:
    """Stop request from a user or a scheduler: the first signal, which ends the running attempt."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The first signal received."""
        self._leaders: Sequence[int] = ()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Forward signals to the running attempt while this context is active."""
        before = {number: signal.signal(number, self._on_signal) for number in FORWARDED_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def forwarding_to(self, leaders: Sequence[int]) -> Iterator[None]:
        """Forward signals to the processes of these sessions or groups while this context is active."""
        self._leaders = leaders
        if self.signal is not None:
            # The signal arrived before there was an attempt to forward it to.
            self._forward(self.signal)
        try:
            yield
        finally:
            self._leaders = ()

    def wait(self, seconds: float) -> bool:
        """Sleep for ``seconds`` or until a signal arrives; return True if one has arrived."""
        end = time.monotonic() + seconds
        while self.signal is None and time.monotonic() < end:
            time.sleep(min(_POLL_SECONDS, max(end - time.monotonic(), 0.0)))
        return self.signal is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            # A second request: the user does not want to wait.
            number = signal.SIGKILL
        else:
            self.signal = signal.Signals(number)
        if self._leaders:
            self._forward(number)

    def _forward(self, number: int) -> None:
        members = _members(self._leaders)
        # Only to the ranks, if they run here: they save, and their launchers end when they do. A launcher that receives
        # Ctrl-C as well prints a traceback, and one that receives SIGTERM kills its ranks half a minute later.
        if number != signal.SIGKILL:
            members = _ranks(members) or members
        for process in members:
            _send(process, number)


# Found by session and group, not by parent: an orphaned rank gets a new parent but keeps its session. Ids are read anew
# at each call, because processes start and end meanwhile.
def _members(leaders: Sequence[int]) -> list[psutil.Process]:
    """Return the running processes in sessions or groups led by these processes, including the leaders."""
    found = []
    for number in psutil.pids():
        try:
            process = psutil.Process(number)
            is_member = os.getsid(number) in leaders or os.getpgid(number) in leaders
            if is_member and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, PermissionError, psutil.Error):
            # It has ended meanwhile, or belongs to another user.
            continue
    return found


def _ranks(members: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the processes to which a launcher assigned a rank; empty if that cannot be determined."""
    # A rank's descendants inherit the variable, and so does this process if a rank started it.
    if _RANK in os.environ:
        return []
    parent_pids: dict[int, int] = {}
    for process in members:
        # It may have ended meanwhile.
        with suppress(OSError, psutil.Error):
            if _RANK in process.environ():
                parent_pids[process.pid] = process.ppid()
    return [
        process for process in members if process.pid in parent_pids and parent_pids[process.pid] not in parent_pids
    ]


def end_all(leaders: Sequence[int]) -> int:
    """End all processes left in sessions or groups, because killed launchers leave their ranks; return their number."""
    left = _members(leaders)
    for process in left:
        _send(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(left, timeout=_LEAVE_SECONDS)
    # Include processes that these started meanwhile.
    for process in {*alive, *_members(leaders)}:
        _send(process, signal.SIGKILL)
    return len(left)


def _send(process: psutil.Process, number: int) -> None:
    # It may have ended.
    with suppress(psutil.Error):
        process.send_signal(number)


def run_in_group(words: Sequence[str], stop: SignalForwarder, *, own_session: bool = True) -> tuple[int, int]:
    """Execute a command to its end, with output to our own streams.

    Return its exit code (128 plus the signal's number if one ended it), and how many processes it left behind. With
    ``own_session``, all descendants can be found again, even those in groups of their own; otherwise the command gets a
    group in this process's session, so that this process's supervisor finds it. Raise LongCtxError if it cannot be
    started.
    """
    # A terminal's Ctrl-C reaches only this process.
    popen_options: dict[str, Any] = {"start_new_session": True}
    if not own_session:
        popen_options = {"process_group": 0}
    try:
        process = subprocess.Popen(list(words), **popen_options)
    except OSError as error:
        raise LongCtxError(f"{words[0]} cannot be started: {error.strerror}.\nIs the environment active?") from error
    with stop.forwarding_to([process.pid]):
        code = process.wait()
        left = end_all([process.pid])
    return (128 - code if code < 0 else code), left

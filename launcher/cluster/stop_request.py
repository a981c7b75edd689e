"""``StopRequest``: a request to end a run before its last step; it ends the process if a save is no longer possible.

A signal, a time limit or a lost launcher only records the request here. After each step, all ranks check for it
together (``launcher/training/run_stop.py``).
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from types import FrameType
from typing import Literal

import psutil

from parallel.runtime.launched import environment_rank
from parallel.runtime.launcher_processes import Launcher, find_launcher_chain
from parallel.runtime.watch.current import active_watch
from parallel.runtime.watch.ending_signals import ENDING
from parallel.runtime.watch.failure import FAILED, SIGINT_CODE, Failure
from parallel.runtime.watch.last_message import end_process, print_last_message

Kind = Literal["signal", "max_seconds", "launcher"]
LAUNCHER: Kind = "launcher"
"""The only stop reason that is not a request."""


class Signalled(KeyboardInterrupt):
    """Signal received before the first step: it ends the current work as Ctrl-C does."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Reason for stopping a run."""

    kind: Kind
    message: str
    """Cause, worded as the end of a sentence."""
    rank: int
    host: str
    time: float
    """Unix time."""

    @classmethod
    def on_this_rank(cls, kind: Kind, message: str) -> Reason:
        """Build a reason on this rank at the current time."""
        return cls(kind=kind, message=message, rank=_rank(), host=socket.gethostname(), time=time.time())

    def words(self) -> str:
        """Return one line with the cause, the rank and host, and the time."""
        timestamp = datetime.fromtimestamp(self.time).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        return f"The reason: {self.message}, received by rank {self.rank} on {self.host} at {timestamp}."


class StopRequest:
    """Request for this process to stop, with its reason."""

    def __init__(self) -> None:
        # Defaults until the settings are read, because a process watches its launcher before that.
        self.max_seconds = 0.0
        """Time limit since the process started; 0 for no limit."""
        self.launcher_timeout_seconds = 10.0
        """Time in which a run without its launcher must start to save."""
        self._process_start_time = psutil.Process().create_time()
        self._has_started_steps, self._num_signals = False, 0
        self._stop_accepted = threading.Event()
        self._ancestors: list[Launcher] = []
        self.saving = threading.Lock()
        """Held while a checkpoint is written, so that the process is not ended meanwhile."""
        self.step_seconds = self.save_seconds = 0.0
        """Durations of the last step and the last save."""
        self.reason: Reason | None = None
        """The first request's reason; None until a stop is requested."""

    @property
    def reserve_seconds(self) -> float:
        """Seconds to reserve before a time limit: one step and one save, because the limit is checked once per step."""
        return self.step_seconds + self.save_seconds

    def listen(self) -> None:
        """Install the signal handlers. Called in the main thread after the watchdog over the ranks has started.

        Before the first step a signal ends the current work; from ``begin_steps`` on it requests a stop. Signals that
        were ignored when the process started (by nohup, or by a shell's &) stay ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._ancestors = find_launcher_chain()
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def begin_steps(self) -> None:
        """Record that there is now state to save."""
        self._has_started_steps = True
        if (member := active_watch()) is not None:
            member.signals.deferred = True

    def request(self, reason: Reason) -> None:
        """Request a stop; the first reason is kept."""
        if self.reason is None:
            self.reason = reason

    def is_requested(self) -> bool:
        """Return True if this rank wants to stop."""
        if self.max_seconds and time.time() - self._process_start_time + self.reserve_seconds > self.max_seconds:
            self.request(Reason.on_this_rank("max_seconds", f"run.max_seconds={self.max_seconds:g} is nearly over"))
        return self.reason is not None

    def set_accepted(self) -> None:
        """Record that all ranks have agreed to stop: a lost launcher then waits for the save."""
        self._stop_accepted.set()

    def on_launcher_exit(self, launcher: Launcher | str) -> None:
        """Request a stop because a launcher is gone; end the process if it cannot stop in time. Runs in a thread."""
        message = f"{launcher} is gone"
        self.request(Reason.on_this_rank(LAUNCHER, message))
        how = "before the first step: no training state to save"
        # Ranks can only stop together, after a step. If they agree in time, the run ends with a save, as on a signal.
        if self._has_started_steps:
            if self._stop_accepted.wait(self.launcher_timeout_seconds):
                return
            how = (
                f"without a save: its step took longer than run.orphan_seconds={self.launcher_timeout_seconds:g}.\n"
                "Resume from the newest checkpoint with --run.resume latest"
            )
        # A checkpoint that is being written is finished first.
        with self.saving:
            end_for(f"{message[0].upper()}{message[1:]}, so rank {_rank()} on {socket.gethostname()} ended {how}.")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        received, member = signal.Signals(number), active_watch()
        if member is not None and member.is_ending:
            # The launcher ends the remaining ranks. The watchdog uses SIGINT to stop this thread.
            if received == signal.SIGINT:
                raise KeyboardInterrupt
            return
        if not self._has_started_steps:
            if received == signal.SIGINT:
                raise KeyboardInterrupt
            raise Signalled(received)
        if received == signal.SIGINT:
            self._num_signals += 1
            # If ranks are watched, the watchdog has received it too, regardless of this thread's state.
            if self._num_signals > 1:
                end_process(SIGINT_CODE)
        gone = None
        if received == signal.SIGTERM:
            # A supervisor sends SIGTERM to ranks that have lost their launcher, and may notice the loss first.
            gone = next((launcher for launcher in self._ancestors if launcher.is_gone()), None)
        if gone is not None:
            self.request(Reason.on_this_rank(LAUNCHER, f"{gone} is gone"))
        else:
            self.request(Reason.on_this_rank("signal", f"{received.name} came"))


def end_for(text: str, code: int = FAILED) -> None:
    """End this process and all ranks from a thread: the main thread may be in a call that never returns."""
    member = active_watch()
    if member is None:
        print_last_message(text)
        end_process(code)
    member.end_for(Failure(rank=_rank(), code=code, text=text))
    # The watchdog ends this process, unless the connection to the coordinator is lost as well.
    time.sleep(4.0)
    end_process(code)


def _rank() -> int:
    return environment_rank()[0]

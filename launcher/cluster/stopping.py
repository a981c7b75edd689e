"""``Stop``: a request to end a run before its last step; it ends the process if a save is no longer possible.

A signal, a time limit or a lost launcher only records the request here. After each step, all ranks check for it
together (``launcher/training/stopping.py``).
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
from parallel.runtime.parents import Launcher, launchers_above
from parallel.runtime.watch.current import watching
from parallel.runtime.watch.failure import FAILED, INTERRUPTED, Failure
from parallel.runtime.watch.interrupts import ENDING
from parallel.runtime.watch.last_words import end_process, say

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
    what: str
    """Cause, worded as the end of a sentence."""
    rank: int
    host: str
    time: float
    """Unix time."""

    @classmethod
    def here(cls, kind: Kind, what: str) -> Reason:
        """Build a reason on this rank at the current time."""
        return cls(kind=kind, what=what, rank=_rank(), host=socket.gethostname(), time=time.time())

    def words(self) -> str:
        """Return one line with the cause, the rank and host, and the time."""
        when = datetime.fromtimestamp(self.time).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        return f"The reason: {self.what}, heard by rank {self.rank} on {self.host} at {when}."


class Stop:
    """Request for this process to stop, with its reason."""

    def __init__(self) -> None:
        # Defaults until the settings are read, because a process watches its launcher before that.
        self.max_seconds = 0.0
        """Time limit since the process started; 0 for no limit."""
        self.orphan_seconds = 10.0
        """Time in which a run without its launcher must start to save."""
        self._began = psutil.Process().create_time()
        self._steps_have_begun, self._interrupts = False, 0
        self._agreed = threading.Event()
        self._launchers: list[Launcher] = []
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
        self._launchers = launchers_above()
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._hear)

    def begin_steps(self) -> None:
        """Record that there is now state to save."""
        self._steps_have_begun = True
        if (member := watching()) is not None:
            member.signals.deferred = True

    def ask(self, reason: Reason) -> None:
        """Request a stop; the first reason is kept."""
        if self.reason is None:
            self.reason = reason

    def is_asked(self) -> bool:
        """Return True if this rank wants to stop."""
        if self.max_seconds and time.time() - self._began + self.reserve_seconds > self.max_seconds:
            self.ask(Reason.here("max_seconds", f"run.max_seconds={self.max_seconds:g} is nearly over"))
        return self.reason is not None

    def agree(self) -> None:
        """Record that all ranks have agreed to stop: a lost launcher then waits for the save."""
        self._agreed.set()

    def lose_launcher(self, launcher: Launcher | str) -> None:
        """Request a stop because a launcher is gone; end the process if it cannot stop in time. Runs in a thread."""
        lost = f"{launcher} is gone"
        self.ask(Reason.here(LAUNCHER, lost))
        how = "before the first step: there was nothing to save"
        # Ranks can only stop together, after a step. If they agree in time, the run ends with a save, as on a signal.
        if self._steps_have_begun:
            if self._agreed.wait(self.orphan_seconds):
                return
            how = (
                f"without a save: its step took longer than run.orphan_seconds={self.orphan_seconds:g}.\n"
                "Go on from the newest checkpoint with --run.resume latest"
            )
        # A checkpoint that is being written is finished first.
        with self.saving:
            end_for(f"{lost[0].upper()}{lost[1:]}, so rank {_rank()} on {socket.gethostname()} ended {how}.")

    def _hear(self, number: int, frame: FrameType | None) -> None:
        asked, member = signal.Signals(number), watching()
        if member is not None and member.is_ending:
            # The launcher ends the remaining ranks. The watchdog uses SIGINT to stop this thread.
            if asked == signal.SIGINT:
                raise KeyboardInterrupt
            return
        if not self._steps_have_begun:
            if asked == signal.SIGINT:
                raise KeyboardInterrupt
            raise Signalled(asked)
        if asked == signal.SIGINT:
            self._interrupts += 1
            # If ranks are watched, the watchdog has received it too, regardless of this thread's state.
            if self._interrupts > 1:
                end_process(INTERRUPTED)
        gone = None
        if asked == signal.SIGTERM:
            # A supervisor sends SIGTERM to ranks that have lost their launcher, and may notice the loss first.
            gone = next((launcher for launcher in self._launchers if launcher.is_gone()), None)
        if gone is not None:
            self.ask(Reason.here(LAUNCHER, f"{gone} is gone"))
        else:
            self.ask(Reason.here("signal", f"{asked.name} came"))


def end_for(text: str, code: int = FAILED) -> None:
    """End this process and all ranks from a thread: the main thread may be in a call that never returns."""
    member = watching()
    if member is None:
        say(text)
        end_process(code)
    member.end_for(Failure(rank=_rank(), code=code, text=text))
    # The watchdog ends this process, unless the connection to the coordinator is lost as well.
    time.sleep(4.0)
    end_process(code)


def _rank() -> int:
    return environment_rank()[0]

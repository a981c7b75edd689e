"""Decision after an attempt: the run is done, another attempt is worthwhile, or it would not help."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher.cluster.exit import ABORTED, DONE, NOT_IN_STORE, USAGE_ERROR
from launcher.cluster.stop_request import LAUNCHER
from launcher.supervise.attempt import Ending

AGAIN = "again"
"""Verdict for an attempt that another one should follow."""
_SIGNALS = {128 + number: number.name for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
"""Exit codes after a signal that requests an end."""
_MOST_WAIT_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class RetryLimits:
    """Limits on restarts."""

    retries: int
    """Attempts after the first one."""
    wait_seconds: float
    """Pause before the first restart, doubled before each further one, up to five minutes, until the run advances."""

    def wait(self, failures: int) -> float:
        """Return the seconds to wait after this many consecutive failures without progress."""
        return min(self.wait_seconds * 2 ** (failures - 1), max(_MOST_WAIT_SECONDS, self.wait_seconds))


@dataclass(frozen=True, kw_only=True)
class State:
    """The run folder's state after an attempt."""

    step: int | None
    """Last recorded step; None if there is none yet."""
    saved: int | None
    """The newest checkpoint's step; None without one."""
    stopped: str | None = None
    """Why the attempt stopped early with a checkpoint; None if it did not."""
    failed_hosts: Sequence[str] = ()
    """Hosts that computed a wrong number, which ended the attempt (``run.audit_every``)."""


# A restart helps against transient failures only. Two failures in a row at the same step count as deterministic (bad
# data, a bug, too little memory). Usage errors and stop requests are final. A host with one wrong number is excluded
# from later attempts, and a second one from the same host ends the run.
@dataclass
class RestartPolicy:
    """Restart policy over consecutive attempts."""

    limits: RetryLimits
    last_step: int
    """The run's last step."""
    saves: bool
    """True if the run writes checkpoints."""
    attempts: int = 0
    failures: int = 0
    """Consecutive failures without progress between them."""
    reached: int | None = field(default=None, init=False)
    """Step at the last failure; None if it came before any step."""
    failed_hosts: list[str] = field(default_factory=list, init=False)
    """Hosts that computed a wrong number in an attempt."""

    def decide(self, ending: Ending, state: State) -> str | None:
        """Return None if the run is done, ``AGAIN``, or the reason why it ends here."""
        self.attempts += 1
        if ending.code == DONE and self._is_done(ending, state):
            return None
        is_the_same = self.failures > 0 and state.step == self.reached
        self.reached = state.step
        if not is_the_same:
            # The run got further than before, or less far: either way, this is another failure than the last one.
            self.failures = 0
        self.failures += 1
        if ending.code == USAGE_ERROR:
            return "exit code 2 means an error in the command or its settings: a restart would not help."
        if ending.code == ABORTED:
            return "the training was interrupted (exit code 130): it is not restarted."
        # A lost launcher is no requested stop, although its ranks saved before they ended.
        if state.stopped is not None and state.stopped != LAUNCHER:
            return f"the training was asked to stop, and saved {self.where()}: it is not restarted."
        if ending.code in _SIGNALS:
            return f"the training was ended by {_SIGNALS[ending.code]}: it is not restarted."
        repeated = [host for host in state.failed_hosts if host in self.failed_hosts]
        if repeated:
            return f"{' and '.join(repeated)} computed wrong numbers in two attempts: that machine is unreliable."
        self.failed_hosts += state.failed_hosts
        # All steps are done: another attempt only uploads.
        if ending.code == NOT_IN_STORE and self.attempts <= self.limits.retries:
            return AGAIN
        if ending.code == NOT_IN_STORE:
            return f"the run is complete, and after {self.attempts} attempts its last checkpoint is not in its store."
        if is_the_same:
            return f"two attempts in a row ended {self.where()}: a restart would not help."
        if self.attempts > self.limits.retries:
            return (
                f"attempt {self.attempts} ended with exit code {ending.code} {self.where()}, and was the last one "
                f"(--retries {self.limits.retries})."
            )
        return AGAIN

    def where(self) -> str:
        """Describe the last attempt's progress."""
        if self.reached is None:
            return "before its first step"
        return f"after step {self.reached} of {self.last_step}"

    def _is_done(self, ending: Ending, state: State) -> bool:
        """Return True if exit code 0 is genuine: DeepSpeed's runner also returns 0 for a killed launcher."""
        if state.step is None or state.step < self.last_step:
            return False
        # Ranks left behind may have been about to write the last checkpoint.
        return not ending.num_leftover or not self.saves or state.saved == self.last_step

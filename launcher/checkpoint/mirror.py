"""Copy a run's checkpoints to an object store in a rank 0 thread. Training continues even if the store fails.

A failure is logged once and retried with growing pauses. When the run ends, checkpoints missing from the store are
logged, and the next start sends them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from launcher.checkpoint.checkpoint_store import CheckpointStore
from launcher.checkpoint.names import step_of
from launcher.checkpoint.retention import Retention, RetentionCandidate
from launcher.wording import format_count, short_duration
from longctx.checkpoint_format import PROOF_FILE, list_checkpoints
from longctx.errors import CheckpointError, DataError
from parallel.runtime.activity import begin

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5.0, 600.0
"""Pause before the second attempt, and its limit; each pause doubles the previous one."""
_LAST_ATTEMPTS = 3
"""Attempts once the run has ended and waits."""
_LEAVE_SECONDS = 5.0
"""Time for a cancelled transfer to stop."""


class _TransferCancelledError(DataError):
    """Transfer cancelled because the run no longer waits for it."""


class _StoreSession:
    """Store operations, called only from the mirror thread. They raise DataError if the store refuses or fails."""

    def __init__(self, run_folder: Path, store: CheckpointStore, retention: Retention, *, step: int) -> None:
        self._run, self._store, self._retention, self._step = run_folder, store, retention, step
        self._has_discarded = False
        self.local_failure: Path | None = None
        """The last checkpoint that a local fault kept from being sent; None once a later one is sent."""
        self._known: dict[int, RetentionCandidate] = {}
        """Candidates read from the store. They never change, except for their proof."""

    def discard_newer(self) -> None:
        """Discard stored checkpoints after the step at which this run started, on the first call."""
        if self._has_discarded:
            return
        for step, stored in self._store.checkpoints().items():
            if step > self._step:
                stored.discard()
                log.info("Removed %s: this run resumed from an earlier step.", stored.place)
        self._has_discarded = True

    def send(self, folder: Path, seen: Callable[[int], None]) -> None:
        """Send a checkpoint, with its proof if it has one."""
        start_time, sent = time.monotonic(), 0

        def see(count: int) -> None:
            nonlocal sent
            sent += count
            seen(count)

        # The byte count shows whether anything was sent: an earlier process may have sent it already.
        try:
            self._store.send(folder, seen=see)
        except CheckpointError as error:
            # A local fault, not the store's: a retry would not help.
            log.warning("%s was not sent to %s: %s", folder.name, self._store, error)
            self.local_failure = folder
            return
        self.local_failure = None
        if sent:
            log.info("Sent %s to %s in %s.", folder.name, self._store, short_duration(time.monotonic() - start_time))
        self.send_proof(folder)

    def send_proof(self, folder: Path) -> None:
        """Send a checkpoint's proof, if it has one."""
        if (folder / PROOF_FILE).is_file():
            self._store.send_proof(folder)
            self._known.pop(step_of(folder), None)

    def prune(self) -> None:
        """Remove unfinished checkpoints and those that retention does not keep."""
        stored_steps = self._store.steps()
        # Manifests are slow to read from a store, so candidates are cached between turns.
        self._known = {step: one for step, one in self._known.items() if step in stored_steps}
        for step, stored in stored_steps.items():
            if stored.is_complete and step not in self._known:
                self._known[step] = stored.candidate(step)
        kept = self._retention.reasons(
            [self._known[step] for step, stored in stored_steps.items() if stored.is_complete]
        )
        for step, stored in stored_steps.items():
            if step not in kept:
                stored.remove()


# The queue has one slot: if the store is slower than the save interval, a newer checkpoint replaces the waiting one.
# Backlog and held disk space stay bounded, and the store always receives the newest state.
class Mirror:
    """Sender for committed checkpoints. Prunes the store by the run's retention."""

    def __init__(self, run_folder: Path, store: CheckpointStore, retention: Retention, *, step: int) -> None:
        """Prepare for a run at ``step``: later checkpoints in the store belong to a history that the run has left."""
        self._run, self._store = run_folder, store
        self._store_session = _StoreSession(run_folder, store, retention, step=step)
        self._changed = threading.Condition()
        self._waiting: Path | None = None
        """The newest checkpoint that still waits to be sent."""
        self._in_flight: Path | None = None
        self._pending_proofs: set[Path] = set()
        """Checkpoints whose proof must still be sent."""
        self._failures = 0
        """Consecutive failed attempts."""
        self._reason = ""
        self._left = self._ends = False
        # A daemon: the process must be able to exit even if the store does not answer.
        self._thread = threading.Thread(target=self._run_thread, name="mirror", daemon=True)

    def start(self) -> None:
        """Start the thread with the newest local checkpoint, because an earlier process may not have sent it."""
        checkpoints = list_checkpoints(self._run)
        if checkpoints:
            self.add(checkpoints[-1])
        self._thread.start()

    def add(self, folder: Path) -> None:
        """Queue a committed checkpoint; it replaces one that still waits."""
        with self._changed:
            if self._waiting is not None and self._waiting != folder:
                log.info(
                    "%s was not sent to %s: the newer %s replaces it.", self._waiting.name, self._store, folder.name
                )
            self._waiting = folder
            self._changed.notify_all()

    def add_proof(self, folder: Path) -> None:
        """Queue a checkpoint's proof, to be sent after the checkpoint itself."""
        with self._changed:
            self._pending_proofs.add(folder)
            self._changed.notify_all()

    def held(self) -> set[int]:
        """Return the steps that must stay on disk because they are being sent."""
        with self._changed:
            return {step_of(folder) for folder in (self._waiting, self._in_flight) if folder is not None}

    def finish(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until all is sent or the store keeps failing; log a missing checkpoint.

        Return True if the newest checkpoint is in the store.
        """
        with self._changed:
            self._ends, self._failures = True, 0
            self._changed.notify_all()
            if self._is_busy():
                log.info("Waiting for %s to be stored in %s.", self._name(), self._store)
            self._wait_for_all(time.monotonic() + seconds)
            name = self._name()
            is_left = self._left = self._is_busy()
            self._changed.notify_all()
        # The thread checks ``_left`` with every buffer that it sends or reads. If the store hangs, the daemon thread is
        # abandoned at exit.
        self._thread.join(_LEAVE_SECONDS)
        if is_left:
            why = f": {self._reason}" * bool(self._reason)
            log.warning(
                "%s is not in %s%s\nIt is in %s. The run's next start sends it.", name, self._store, why, self._run
            )
        return not is_left and self._store_session.local_failure is None

    def _wait_for_all(self, end: float) -> None:
        """Wait until all is sent, the store keeps failing, or the clock reaches ``end``."""
        while self._is_busy() and self._failures < _LAST_ATTEMPTS and time.monotonic() < end:
            # A new span per second tells the hang watchdog that this rank only waits.
            begin("sending a checkpoint to its store", disk=True)
            self._changed.wait(min(1.0, max(0.0, end - time.monotonic())))

    def _is_busy(self) -> bool:
        return self._waiting is not None or self._in_flight is not None or bool(self._pending_proofs)

    def _name(self) -> str:
        """Return the pending transfer's name for a message."""
        folder = self._waiting or self._in_flight
        if folder is None:
            return "a checkpoint's proof file"
        return f"checkpoint {folder.name}"

    def _run_thread(self) -> None:
        while self._next():
            try:
                self._take_turn()
            except _TransferCancelledError:
                return
            except Exception as error:
                # Catch every error class: not even a bug here may end the run.
                self._failed(error)
            else:
                self._succeeded()

    def _next(self) -> bool:
        """Wait for work, then for the pause after a failure. Return False if the thread should exit."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_busy() or self._ends)
            pause = 0.0
            if self._failures:
                pause = min(_FIRST_PAUSE_SECONDS * 2 ** (self._failures - 1), _LONGEST_PAUSE_SECONDS)
            # When the run ends, retry at once instead of finishing a pause that started earlier.
            was_ending = self._ends
            self._changed.wait_for(lambda: self._left or self._ends != was_ending, timeout=pause)
            return self._is_busy() and not self._left

    def _take_turn(self) -> None:
        """Send the waiting checkpoint and proofs, then prune. Raise DataError if the store refuses or fails."""
        self._store_session.discard_newer()
        with self._changed:
            # Retry a checkpoint that failed before, unless a newer one waits.
            self._in_flight, self._waiting = self._waiting or self._in_flight, None
            folder, proofs = self._in_flight, set(self._pending_proofs)
        # Outside the lock: a transfer may take minutes, and ``add`` must not block training.
        if folder is not None:
            self._store_session.send(folder, self._see)
        for one in proofs:
            self._store_session.send_proof(one)
        self._store_session.prune()
        # Work is cleared only after success, so a failed turn is repeated.
        with self._changed:
            self._in_flight = None
            self._pending_proofs -= proofs
            self._changed.notify_all()

    def _see(self, count: int) -> None:
        """Cancel the transfer if the run no longer waits. Called as bytes are sent and read back."""
        if self._left:
            raise _TransferCancelledError("the run has ended")

    def _failed(self, error: Exception) -> None:
        with self._changed:
            self._failures += 1
            is_first, self._reason = not self._reason, str(error) or repr(error)
            self._changed.notify_all()
        if is_first and not self._ends:
            log.warning(
                "checkpoint.store: %s\nTraining continues, the upload is retried, and its success will be logged.",
                error,
            )

    def _succeeded(self) -> None:
        with self._changed:
            failures, had_failed, self._failures, self._reason = self._failures, bool(self._reason), 0, ""
        if had_failed:
            log.info(
                "checkpoint.store: %s accepts checkpoints again, after %s.",
                self._store,
                format_count(failures, "failure"),
            )

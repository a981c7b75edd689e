"""Stop a run on all ranks together: agreed in a step's sums, saved once, with a command to resume.

Each rank adds its request to a step's sums (``RunningStep.stop_requested``): all ranks learn about it at the same step,
without an additional collective. Validation asks once per micro-batch.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from torch.distributed.launcher.api import LaunchConfig

from launcher.cluster.stop_request import Reason, StopRequest
from launcher.config.config_sections import AUTO
from launcher.config.flags import take_flag
from launcher.metrics.metrics_writer import RecordWriter
from launcher.metrics.record import STOP_EVENT, Record, read_metrics
from launcher.run_folder import LOGS
from launcher.training.run_state import Progress, TrainingRun
from longctx.checkpoint_format import list_checkpoints
from parallel.comm.world import any_rank, gather_objects, on_rank_0
from parallel.runtime.launched import COMMAND
from parallel.runtime.launcher_processes import find_launcher_chain, is_launcher_word

log = logging.getLogger(__name__)

_LAUNCHER_SECONDS = 30.0
"""Seconds after which DeepSpeed's launcher and torchrun, asked to end, kill remaining ranks."""
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Variable that sets these seconds for torchrun."""
_STORE_TIMEOUT_SECONDS = 10.0
"""Limit for a stopping run to wait for its store. The next start sends missing files."""


def any_rank_requested_stop(stop: StopRequest) -> bool:
    """Return True if any rank was asked to stop; then all of them stop. Collective."""
    requested = any_rank(stop.is_requested())
    if requested:
        stop.set_accepted()
    return requested


def launcher_seconds(environment: Mapping[str, str]) -> float:
    """Return how many seconds a rank's launcher, given its environment, waits for it once both were asked to end."""
    # torchrun's own variable, in torch 2.12 and newer: DeepSpeed's launcher does not read it.
    is_read = "TORCHELASTIC_RUN_ID" in environment and "shutdown_timeout" in LaunchConfig.__dataclass_fields__
    if is_read and environment.get(SHUTDOWN_TIMEOUT, "").isdigit():
        return float(environment[SHUTDOWN_TIMEOUT])
    return _LAUNCHER_SECONDS


class Stopping:
    """A run's end, from the agreed step to its last message."""

    def __init__(self, run: TrainingRun) -> None:
        self._run, self._has_warned = run, False
        # Read now: the launcher may be gone later.
        self._command = started_by() or [sys.executable, *sys.argv]

    def clear_finished_validation(self, progress: Progress) -> Progress:
        """Return a resumed run's progress; a validation skipped by a stop may already be done. Collective."""
        if not progress.validation_due:
            return progress
        was_done = on_rank_0(lambda: _was_validated(self._run.folder, progress.step))
        return replace(progress, validation_due=not was_done)

    def saved(self, seconds: float) -> None:
        """Store the last save's seconds; warn once if a launcher would not wait for one."""
        self._run.stop.save_seconds = seconds
        needed, granted = self._run.stop.reserve_seconds, launcher_seconds(os.environ)
        if needed > granted and not self._has_warned and self._run.is_rank_0:
            self._has_warned = True
            log.warning(
                "A step and a save take %.0f s here, but a launcher kills its ranks %.0f s after SIGTERM or Ctrl-C. "
                "Send SIGUSR1 to one rank instead, or set run.max_seconds, or for torchrun %s.",
                needed,
                granted,
                SHUTDOWN_TIMEOUT,
            )

    def ends(self, progress: Progress) -> bool:
        """Return True if the run ends here without having finished."""
        return progress.stop_requested and (progress.step < self._run.config.last_step or progress.validation_due)

    def end(self, progress: Progress, writer: RecordWriter, save: Callable[[], None]) -> str:
        """Record the stop after the saved step, and return the message for the user. Collective."""
        run, step = self._run, progress.step
        if not on_rank_0(lambda: bool(list_checkpoints(run.folder))):
            # Stopped before the first step: a folder without a checkpoint could not be resumed.
            save()
        # Each rank knows only its own reason; the earliest one is reported.
        reasons: list[Reason | None] = gather_objects(run.stop.reason)
        first = min((reason for reason in reasons if reason is not None), key=lambda reason: reason.time)
        writer.write(_event(first, step))
        # Work that takes ranks different times comes before they exit.
        run.prefetcher.close()
        run.saver.kept.leave(_STORE_TIMEOUT_SECONDS)
        # Exit together: a launcher ends the others as soon as one rank has exited with an error.
        gather_objects(None)
        newest = list_checkpoints(run.folder)[-1]
        return (
            f"Stopped after step {step} of {run.config.last_step}, and saved {newest}.\n{first.words()}\nEvery rank's "
            f"log: {run.folder / LOGS}/rank_N.log\nResume with: {resume_command(self._command)}"
        )


def _event(reason: Reason, step: int) -> Record:
    return {
        "kind": "event",
        "event": STOP_EVENT,
        "step": step,
        "reason": reason.kind,
        "what": reason.message,
        "rank": reason.rank,
        "host": reason.host,
        "seconds": round(time.time() - reason.time, 3),
    }


def _was_validated(folder: Path, step: int) -> bool:
    return any(record["kind"] == "validation" and record["step"] == step for record in read_metrics(folder))


def resume_command(command: Sequence[str]) -> str:
    """Return the command line that resumes a run: "auto" needs no change."""
    words, resume = take_flag(list(command), "--run.resume")
    if resume == AUTO:
        return shlex.join(command)
    return shlex.join([*words, "--run.resume", "latest"])


def started_by() -> list[str] | None:
    """Return the command line with which a user started this rank; None if it cannot be determined."""
    if COMMAND in os.environ:
        return shlex.split(f"{os.environ[COMMAND]} --ranks {os.environ['WORLD_SIZE']} {shlex.join(sys.argv[1:])}")
    for launcher in reversed(find_launcher_chain()):
        for number, word in enumerate(launcher.words[:4]):
            if is_launcher_word(word):
                return [PurePath(word).name, *launcher.words[number + 1 :]]
    return None

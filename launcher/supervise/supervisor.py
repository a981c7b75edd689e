"""Restart attempts until the run is done, hopeless, stopped, or out of retries."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher.checkpoint.checkpoint_store import store_at
from launcher.cluster.exit import ABORTED, FAILED
from launcher.cluster.hostfile import read_hostfile
from launcher.cluster.sessions import SignalForwarder
from launcher.config.config_sections import AUTO, RunConfig
from launcher.config.load_config import load_run_config
from launcher.metrics.record import STOP_EVENT, Record
from launcher.supervise.attempt import Ending, attempt
from launcher.supervise.host_selection import (
    hosts_of,
    largest_valid,
    offline_hosts,
    suspected_ranks,
    trusted_hosts,
    write_hostfile,
)
from launcher.supervise.progress import discard_steps, last_event, last_step, newest_checkpoint_step
from launcher.supervise.restart_policy import AGAIN, RestartPolicy, RetryLimits, State
from launcher.supervise.training_command import TrainingCommand
from longctx.errors import DataError

log = logging.getLogger(__name__)

RESTARTS_FILE = "restarts.jsonl"
"""One line per failed attempt."""
HOSTFILE = "hostfile.restart"
"""File in the run's folder: the hosts for an attempt on fewer hosts."""


# Each iteration chooses a command line (resume point, hosts), runs it, reads the outcome from the run's folder and asks
# the restart policy. The exit code alone is not enough: DeepSpeed's runner also returns 0 for a killed launcher.
@dataclass(frozen=True)
class Supervised:
    """A run under supervision."""

    command: TrainingCommand
    config: RunConfig
    policy: RestartPolicy
    notify: Callable[[str], None]
    """Prints a line to the user."""

    @classmethod
    def of(cls, command: TrainingCommand, limits: RetryLimits, notify: Callable[[str], None]) -> Supervised:
        """Build from a command; raise ConfigError if its settings do not form a valid run."""
        config = load_run_config(list(command.arguments))
        return cls(command, config, RestartPolicy(limits, config.last_step, config.checkpoint.every_steps > 0), notify)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.run.output_dir)

    def run(self) -> int:
        """Start the command until it is done; return the last attempt's exit code."""
        stop, policy = SignalForwarder(), self.policy
        with stop.listening():
            while True:
                line = self._line(stop)
                if line is None:
                    return ABORTED
                # Read before the attempt, to tell a new event from one that an earlier attempt left.
                previous_event = last_event(self.folder)
                ending = attempt(line.started, stop)
                if ending.num_leftover:
                    self.notify(f"longctx run: ended {ending.num_leftover} processes left by the launcher.")
                if stop.signal is not None:
                    # The user requested the end and needs no explanation.
                    return ending.code
                decision = policy.decide(ending, self._state(previous_event, line))
                if decision is None:
                    return ending.code
                self._record(ending, decision)
                if decision != AGAIN:
                    self.notify(f"longctx run: {decision}\n{self._hint()}")
                    return ending.code or FAILED
                seconds = policy.limits.wait(policy.failures)
                self._announce(ending, seconds)
                if stop.wait(seconds):
                    return ABORTED

    def _state(self, previous_event: Record | None, line: TrainingCommand) -> State:
        """Read the folder's state; ``previous_event`` is its last event before the attempt."""
        event, reason, failed_hosts = last_event(self.folder), None, []
        if event is not None and event != previous_event and event["event"] == STOP_EVENT:
            reason = event["reason"]
        elif event is not None and event != previous_event:
            slots = {}
            if line.hostfile is not None:
                slots = read_hostfile(line.hostfile)
            failed_hosts = hosts_of(suspected_ranks(event), slots, event["world_size"])
        return State(step=last_step(self.folder), saved=self._saved, stopped=reason, failed_hosts=failed_hosts)

    @property
    def _saved(self) -> int | None:
        return newest_checkpoint_step(self.folder)

    def _line(self, stop: SignalForwarder) -> TrainingCommand | None:
        """Return the next attempt's command; None if stopped while waiting for hosts."""
        line, is_first = self.command, not self.policy.attempts
        if is_first:
            # The same command line starts and resumes a run, so that a scheduler can start the job again.
            has_started = self._saved is not None or last_step(self.folder) is not None
            if self.config.run.resume in ("latest", "newest-good") and not has_started and not self._is_in_store():
                line = fresh_start_command(line, self.config)
            return line
        # "auto" handles all of this itself. A checkpoint path from another run stays until this run has a checkpoint.
        if self.config.run.resume != AUTO and (self._saved is not None or self._is_in_store()):
            line = line.resuming("newest-good")
        elif self.config.run.resume in ("no", "latest", "newest-good"):
            discard_steps(self.folder)
            line = fresh_start_command(line, self.config)
        if line.hostfile is None:
            return line
        return self._on_answering(line, read_hostfile(line.hostfile), stop)

    def _is_in_store(self) -> bool:
        return has_checkpoint(self.config.checkpoint.store, self.notify)

    def _on_answering(
        self, line: TrainingCommand, slots: dict[str, int], stop: SignalForwarder
    ) -> TrainingCommand | None:
        """Return the command on the hosts that answer; wait while they are too few."""
        slots, excluded = trusted_hosts(slots, self.policy.failed_hosts, self.config)
        questions = 0
        while (offline := offline_hosts(slots)) or excluded:
            chosen = largest_valid({host: n for host, n in slots.items() if host not in offline}, self.config)
            reasons = []
            if excluded:
                reasons.append(f"{', '.join(excluded)} computed a wrong number and is excluded")
            if offline:
                reasons.append(f"{', '.join(offline)} does not answer over ssh")
            gone = f"longctx run: {'; '.join(reasons)}"
            if chosen:
                write_hostfile(self.folder / HOSTFILE, chosen)
                ranks, all_hosts = sum(chosen.values()), len(slots) + len(excluded)
                self.notify(f"{gone}. Continuing with {len(chosen)} of {all_hosts} hosts, {ranks} ranks.")
                return line.on_hosts(self.folder / HOSTFILE)
            questions += 1
            # At least a second: with --wait-seconds 0 it would poll without a pause.
            seconds = max(self.policy.limits.wait(questions), 1.0)
            self.notify(
                f"{gone}, and the remaining hosts allow no valid run (degrees, train.tokens_per_step). Checking again "
                f"in {seconds:.0f} s. Ctrl-C ends it."
            )
            if stop.wait(seconds):
                return None
        return line

    def _announce(self, ending: Ending, seconds: float) -> None:
        """Report the attempt's end and the next action."""
        next_action = "There is no checkpoint yet: starting from scratch"
        if self._saved is not None or self._is_in_store():
            next_action = "Resuming from the newest good checkpoint"
        left = self.policy.limits.retries - self.policy.attempts
        self.notify(
            f"longctx run: attempt {self.policy.attempts} ended with exit code {ending.code} {self.policy.where()}, "
            f"after {ending.seconds:.0f} s. {next_action} in {seconds:.0f} s; {left} more after that. Ctrl-C ends it."
        )

    def _hint(self) -> str:
        """Return the log location, and the command to continue with after fixing the problem."""
        hint = f"Its output is above and in {self.folder / 'logs'}."
        if self._saved is not None:
            hint += f"\nResume with: {self.command.resuming('newest-good')}"
        return hint

    def _record(self, ending: Ending, decision: str) -> None:
        """Append a record to the restarts file, if the run's folder exists."""
        if not self.folder.is_dir():
            return
        values: dict[str, Any] = {
            "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "attempt": self.policy.attempts,
            "exit_code": ending.code,
            "step": self.policy.reached,
            "seconds": round(ending.seconds, 1),
            "left_behind": ending.num_leftover,
            "verdict": decision,
        }
        try:
            with (self.folder / RESTARTS_FILE).open("a") as file:
                file.write(json.dumps(values) + "\n")
        except OSError as error:
            # A full disk may be the reason for the failed attempt; the next attempt will report it.
            log.warning("%s cannot be written: %s", self.folder / RESTARTS_FILE, error)


def fresh_start_command(line: TrainingCommand, config: RunConfig) -> TrainingCommand:
    """Return the command line for a new run, ignoring any checkpoint named in the line or its config."""
    # Without the flag, the file's setting applies.
    if line.resume is None and config.run.resume != "no":
        return line.resuming("no")
    return line.resuming(None)


def has_checkpoint(store: str, notify: Callable[[str], None]) -> bool:
    """Return True if the run's store has a checkpoint, even if the folder's disk is lost. False without a store."""
    try:
        return bool(store) and bool(store_at(store).checkpoints())
    except DataError as error:
        # The next start will report it too, and refuses to begin a new run if the store is unreadable.
        notify(f"longctx run: checkpoint.store: {error}")
        return False

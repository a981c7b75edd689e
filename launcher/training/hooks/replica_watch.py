"""``ReplicaWatch``: compare the ranks' state at intervals, and at each save also with the bytes on disk.

Weights that several ranks hold are compared among them; a single rank's weights, with the result of its last update.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from launcher.training.failure_report import fault_event, newest_complete_checkpoint
from launcher.training.hook import RunningStep, StepHook
from launcher.training.run_state import TrainingRun
from launcher.wording import first_names
from longctx.errors import TrainingError
from parallel.comm.messages.message_checksum import Sum, on_host
from parallel.comm.world import gather_objects, long_barrier
from parallel.zero.replica_check import MismatchedTensor, Replicas

_MAX_REPORTED = 3
"""Limit on groups of ranks in a message."""


class ReplicaWatch(StepHook):
    """Hook that compares ranks in every ``run.replicas_every``-th step, and at every save."""

    def __init__(self, run: TrainingRun) -> None:
        self.run, self.replicas = run, Replicas(run.engine)
        self._every = run.config.run.replicas_every

    def before_update(self, step: RunningStep) -> None:
        """Raise TrainingError if ranks differ, before the step changes any state. Collective if a comparison is due."""
        if self._is_due(step.number):
            _check(self.run, self.replicas, f"step {step.number}", step.number)
        # The update changes the state, so its checksums expire.
        self.replicas.clear_sums()

    def after_update(self, step: RunningStep) -> None:
        """Keep checksums of the state until the next update, if that step compares or this one is saved."""
        is_saved = step.stop_requested or self.run.config.saves_after(step.number)
        if self._is_due(step.number + 1) or (is_saved and self._every):
            self._store_sums()

    def before_save(self, step: int) -> list[Sum]:
        """Raise TrainingError if ranks differ in the state to be saved; a rank may be hours late. Collective.

        Return the checksums that this rank's values must have on disk, in order; empty if comparisons are off.
        """
        if not self._every:
            return []
        # Rank 0 may still be hashing the last checkpoint's files, while a comparison waits no longer than a step does.
        long_barrier()
        _check(self.run, self.replicas, f"the weights after step {step}, which are not saved", step + 1)
        # after_update did not expect this save.
        if not self.replicas.own_sums:
            self._store_sums()
        return on_host(self.replicas.own_sums)

    def _store_sums(self) -> None:
        # Values on a disk would have to be read a second time.
        if self.run.config.zero.offload != "nvme":
            self.replicas.store_sums()

    def _is_due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0


def _check(run: TrainingRun, replicas: Replicas, where: str, step: int) -> None:
    odd = replicas.compare()
    if odd:
        hosts = gather_objects(socket.gethostname())
        results = [
            {"ranks": list(one.ranks), "hosts": [hosts[rank] for rank in one.ranks], "what": one.part.describe()}
            for one in odd
        ]
        raise TrainingError(_message(run, odd, hosts, where, step), fault_event(run, step, results))


def _message(run: TrainingRun, odd: Sequence[MismatchedTensor], hosts: Sequence[str], where: str, step: int) -> str:
    """Return one screen, the same on every rank: the mismatches, their hosts, and how to continue."""
    lines = [f"in {where}, bits in weights or moments have changed without an update (run.replicas_every)."]
    found: dict[tuple[tuple[int, ...], bool, bool], list[str]] = {}
    for one in odd:
        found.setdefault((one.ranks, one.decided, one.own), []).append(one.part.describe())
    for (ranks, decided, own), names in list(found.items())[:_MAX_REPORTED]:
        who = first_names([f"{rank} on {hosts[rank]}" for rank in ranks])
        tensor_names = first_names(names)
        if own:
            lines.append(f"Rank {who} has values that differ from its last update: {tensor_names}.")
        elif decided:
            lines.append(f"Rank {who} differs from the ranks that agree: {tensor_names}.")
        else:
            lines.append(f"Ranks {who} differ, and two ranks cannot decide which of them is right: {tensor_names}.")
    if len(found) > _MAX_REPORTED:
        lines.append(f"And {len(found) - _MAX_REPORTED} more such differences.")
    lines.append(
        "They were neither trained on nor saved since they were found. Memory or a processor is faulty; or, with "
        "zero.stage=0, ranks run on different kinds of processors, which round differently (with zero.stage=1, one "
        "rank computes each weight for all)."
    )
    lines.append(_way_out(run, odd, step))
    return "\n".join(lines)


def _way_out(run: TrainingRun, odd: Sequence[MismatchedTensor], step: int) -> str:
    suspect = ""
    if any(one.own for one in odd):
        # Ranks compare before they save. A single rank's values may have changed since its update, and been saved.
        suspect = f"step_{step - 1:06d}"
    checkpoint = newest_complete_checkpoint(run, without=suspect)
    if checkpoint is None:
        return "There is no checkpoint from before: start again."
    return f"Resume from the newest checkpoint that cannot contain them, {checkpoint} (--run.resume {checkpoint})."

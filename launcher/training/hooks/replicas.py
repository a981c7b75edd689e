"""``ReplicaWatch``: compare the ranks' state at intervals, and at each save also with the bytes on disk.

Weights that several ranks hold are compared among them; a single rank's weights, with the result of its last update.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from launcher.training.hook import Step, StepHook
from launcher.training.run import Run
from launcher.training.verdict import newest_checkpoint, wrong_number
from launcher.wording import first_names
from longctx.errors import TrainingError
from parallel.comm.messages.sums import Sum, on_host
from parallel.comm.world import gather_objects, meet_patiently
from parallel.zero.replicas import Odd, Replicas

_TOLD = 3
"""Limit on groups of ranks in a message."""


class ReplicaWatch(StepHook):
    """Hook that compares ranks in every ``run.replicas_every``-th step, and at every save."""

    def __init__(self, run: Run) -> None:
        self.run, self.replicas = run, Replicas(run.engine)
        self._every = run.config.run.replicas_every

    def before_update(self, step: Step) -> None:
        """Raise TrainingError if ranks differ, before the step changes any state. Collective if a comparison is due."""
        if self._is_due(step.number):
            _check(self.run, self.replicas, f"step {step.number}", step.number)
        # The update changes the state, so its checksums expire.
        self.replicas.forget()

    def after_update(self, step: Step) -> None:
        """Keep checksums of the state until the next update, if that step compares or this one is saved."""
        is_saved = step.stop_asked or self.run.config.saves_after(step.number)
        if self._is_due(step.number + 1) or (is_saved and self._every):
            self._remember()

    def before_save(self, step: int) -> list[Sum]:
        """Raise TrainingError if ranks differ in the state to be saved; a rank may be hours late. Collective.

        Return the checksums that this rank's values must have on disk, in order; empty if comparisons are off.
        """
        if not self._every:
            return []
        # Rank 0 may still be hashing the last checkpoint's files, while a comparison waits no longer than a step does.
        meet_patiently()
        _check(self.run, self.replicas, f"the weights after step {step}, which are not saved", step + 1)
        # after_update did not expect this save.
        if not self.replicas.own_sums:
            self._remember()
        return on_host(self.replicas.own_sums)

    def _remember(self) -> None:
        # Values on a disk would have to be read a second time.
        if self.run.config.zero.offload != "nvme":
            self.replicas.remember()

    def _is_due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0


def _check(run: Run, replicas: Replicas, where: str, step: int) -> None:
    odd = replicas.compare()
    if odd:
        hosts = gather_objects(socket.gethostname())
        findings = [
            {"ranks": list(one.ranks), "hosts": [hosts[rank] for rank in one.ranks], "what": one.part.describe()}
            for one in odd
        ]
        raise TrainingError(_message(run, odd, hosts, where, step), wrong_number(run, step, findings))


def _message(run: Run, odd: Sequence[Odd], hosts: Sequence[str], where: str, step: int) -> str:
    """Return one screen, the same on every rank: the mismatches, their hosts, and how to continue."""
    lines = [f"in {where}, bits of weights or moments have changed that nobody wrote (run.replicas_every)."]
    found: dict[tuple[tuple[int, ...], bool, bool], list[str]] = {}
    for one in odd:
        found.setdefault((one.ranks, one.decided, one.own), []).append(one.part.describe())
    for (ranks, decided, own), names in list(found.items())[:_TOLD]:
        who = first_names([f"{rank} on {hosts[rank]}" for rank in ranks])
        what = first_names(names)
        if own:
            lines.append(f"Rank {who} holds what is not what its last update left there: {what}.")
        elif decided:
            lines.append(f"Rank {who} holds other bits than the ranks that agree: {what}.")
        else:
            lines.append(f"Ranks {who} hold different bits, and two cannot say which of them is right: {what}.")
    if len(found) > _TOLD:
        lines.append(f"And {len(found) - _TOLD} more such differences.")
    lines.append(
        "Nothing was trained or saved with them since they were found. Memory or a processor is at fault; or, with "
        "zero.stage=0, ranks run on processors of different kinds, which round differently (zero.stage=1 has one rank "
        "compute each weight for all)."
    )
    lines.append(_way_out(run, odd, step))
    return "\n".join(lines)


def _way_out(run: Run, odd: Sequence[Odd], step: int) -> str:
    suspect = ""
    if any(one.own for one in odd):
        # Ranks compare before they save. A single rank's values may have changed since its update, and been saved.
        suspect = f"step_{step - 1:06d}"
    good = newest_checkpoint(run, without=suspect)
    if good is None:
        return "There is no checkpoint from before: start again."
    return f"Go on from the newest checkpoint that cannot hold them, {good} (--run.resume {good})."

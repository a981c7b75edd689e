"""``StepAudit``: audits a run's steps, and ends the run if a number is wrong (``run.audit_every``)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from launcher.metrics.record import Record
from launcher.training.failure_report import fault_event, newest_complete_checkpoint
from launcher.training.hook import RunningStep, StepHook
from launcher.training.run_state import TrainingRun
from launcher.wording import format_count
from longctx.errors import TrainingError
from parallel.audit.audit_decision import Mismatch
from parallel.audit.operation_audit import LIMIT_BYTES, Audited, OperationAudit
from parallel.zero.optimizer import MASTER

log = logging.getLogger(__name__)


class StepAudit(StepHook):
    """Hook that audits some calls in every ``run.audit_every``-th step."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        config, optimizer = run.config, run.engine.partition.inner
        # Not audited: updates in DeepSpeed's CPU AdamW, and Muon's, which need full matrices.
        if config.zero.offload != "none" or config.train.optimizer == "muon":
            optimizer = None
        audited = Audited(
            device=run.device,
            dtype=run.engine.dtype,
            kernel=config.parallel.kernel,
            weights=self._weights,
            masters=self._masters,
            optimizer=optimizer,
        )
        self._audit = OperationAudit(audited, seed=config.run.seed, every=config.run.audit_every, rank=run.mesh.rank)
        self._has_logged = False
        self._recording = ExitStack()

    def before_forward(self, step: RunningStep) -> None:
        """Copy calls in forward and backward, if the audit covers these."""
        self._watch(step, update=False)

    def before_update(self, step: RunningStep) -> None:
        """Raise TrainingError if other ranks compute different results; then copy calls in the update. Collective."""
        self._resolve(step, update=False)
        self._watch(step, update=True)

    def after_update(self, step: RunningStep) -> None:
        """Raise TrainingError if other ranks compute a different update. Collective."""
        self._resolve(step, update=True)

    def before_log(self, step: RunningStep, record: Record) -> None:
        """Record the kind of the audited operation."""
        kind = self._audit.kind_of(step.number)
        if kind is not None:
            record["audited"] = kind

    def _watch(self, step: RunningStep, *, update: bool) -> None:
        self._recording = step.scope.enter_context(ExitStack())
        self._recording.enter_context(self._audit.capturing(step.number, update=update))

    def _resolve(self, step: RunningStep, *, update: bool) -> None:
        """Have the copied calls recomputed, and raise the error if results differ."""
        # Recording ends before the calls are recomputed.
        self._recording.close()
        results = self._audit.finish(step.number, update=update)
        if results:
            raise self._error(step.number, results, update=update)
        # Ranks are assigned to each other at the first audit: log this once.
        if not self._has_logged and self._audit.assigned:
            self._has_logged = True
            for line in self._audit_lines():
                log.info("%s", line)

    def _audit_lines(self) -> list[str]:
        """Return log lines about the audit: the rank assignment, and the operations not audited."""
        config, ranks, assigned = self._run.config, self._audit.ranks, self._audit.assigned
        lines = [f"{self._who(len(ranks))} (run.audit_every={config.run.audit_every})."]
        kinds = {x.kind for x in ranks}
        if any(not x.exact for x in assigned):
            lines.append(
                f"Ranks produce {len(kinds)} kinds of bitwise results: "
                f"{'; '.join(sorted(kind[0] for kind in kinds))}. A rank without a peer of its kind is compared "
                "within rounding bounds, in matmuls and updates."
            )
        for rank, x in enumerate(ranks):
            peers = [other.results for other in ranks if other.machine == x.machine]
            # A minority among equal machines points to a fault.
            if peers.count(x.results) * 2 < len(peers):
                lines.append(
                    f"Rank {rank} on {x.host} differs from most ranks with the same processor and libraries "
                    f"({x.machine}): it may be faulty."
                )
            if not x.repeats:
                lines.append(f"Rank {rank} on {x.host} is not bitwise deterministic, so audits may report it.")
        left_out = []
        if config.train.compile == "on":
            left_out.append("operations inside compiled regions")
        if config.zero.offload != "none":
            left_out.append("updates, which DeepSpeed's AdamW computes with zero.offload")
        if config.train.optimizer == "muon":
            left_out.append("updates, because Muon updates entire matrices")
        if self._run.device.type != "cpu":
            left_out.append("on a GPU, attention's backward passes, ring attention and grouped expert matmuls")
        if left_out:
            lines.append(f"Not audited: {', and '.join(left_out)}.")
        return lines

    def _who(self, num_ranks: int) -> str:
        limit = f"{LIMIT_BYTES >> 20} MiB"
        if num_ranks == 1:
            return f"An audit repeats one call per step, of up to {limit}, on this rank, which has no peers"
        others = min(2, num_ranks - 1)
        return (
            f"An audit repeats one call from each rank per step, of up to {limit}, on "
            f"{format_count(others, 'other rank')}"
        )

    def _error(self, step: int, results: Sequence[Mismatch], *, update: bool) -> TrainingError:
        text = message(step, results, update=update, checkpoint=newest_complete_checkpoint(self._run))
        return TrainingError(text, fault_event(self._run, step, [_result_record(result) for result in results]))

    def _weights(self) -> Iterable[tuple[str, Tensor]]:
        for name, p in self._run.engine.model.network.named_parameters():
            yield name, p.data

    def _masters(self) -> Iterable[tuple[str, Tensor]]:
        partition = self._run.engine.partition
        for group in partition.groups():
            for name, p in group:
                part = partition.part(name, p, (MASTER,)).get(MASTER)
                if part is not None:
                    yield name, part


def message(step: int, results: Sequence[Mismatch], *, update: bool, checkpoint: Path | None) -> str:
    """Return one screen: the wrong numbers, their ranks, and how to continue."""
    first, *rest = results
    lines = [first.describe(step)]
    if rest:
        others = ", ".join(f"on rank {result.of}: {result.place.call}" for result in rest[:3])
        lines.append(f"{format_count(len(rest), 'other call')} in this step went wrong, too ({others}).")
    if update:
        lines.append(
            "The update was applied, so weights in memory may be wrong; no checkpoint is written for this step."
        )
    else:
        lines.append("The update was not applied: weights, moments and checkpoints are unchanged.")
    lines.append(_way_out(results, checkpoint))
    lines.append(
        "An audit covers a small part of a step: earlier steps may have had wrong numbers, too. Compare their loss."
    )
    return "\n".join(lines)


def _result_record(result: Mismatch) -> Record:
    difference = result.difference
    return {
        "ranks": list(result.candidate_ranks),
        "hosts": list(result.hosts),
        "what": result.place.describe(),
        "rank_of_call": result.of,
        "values": difference.values,
        "of_values": difference.total,
        "bits": list(difference.bits),
        "evidence": result.evidence,
    }


def _way_out(results: Sequence[Mismatch], checkpoint: Path | None) -> str:
    """Name the checkpoint to continue from, and the hosts to exclude."""
    hosts = list(dict.fromkeys(host for result in results for host in result.hosts))
    go_on = "There is no checkpoint yet: start again"
    if checkpoint is not None:
        go_on = f"Resume from {checkpoint} or an older one (--run.resume newest-good)"
    if all(result.is_named for result in results):
        return f"{go_on}, without {' and '.join(hosts)}: remove its line from the hostfile, and test its memory."
    return f"{go_on}. To identify the faulty rank, run on at least three ranks; the hosts are {' and '.join(hosts)}."

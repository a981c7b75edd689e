"""Training step hooks, one per file, and their list."""

from __future__ import annotations

from launcher.training.hook import StepHook
from launcher.training.hooks.audit import StepAudit
from launcher.training.hooks.collapse import Collapse
from launcher.training.hooks.compiling import CompileWatch
from launcher.training.hooks.dead_experts import DeadExperts
from launcher.training.hooks.message_checksums import MessageChecksums
from launcher.training.hooks.plan_watch import PlanWatch
from launcher.training.hooks.replica_watch import ReplicaWatch
from launcher.training.hooks.routing_hook import RoutingHook
from launcher.training.hooks.skip_bad_steps import SkipBadSteps
from launcher.training.hooks.stop_agreement import StopTogether
from launcher.training.run_state import TrainingRun


def step_hooks(run: TrainingRun) -> list[StepHook]:
    """Return a run's hooks in call order."""
    # First those that decide about the step, then those that detect wrong numbers, the audit before comparisons between
    # ranks, and finally those that report.
    hooks: list[StepHook] = [StopTogether(run), SkipBadSteps(run), StepAudit(run)]
    if run.mesh.comm.ledger is not None:
        hooks.append(MessageChecksums(run, run.mesh.comm.ledger))
    if run.routing.active:
        hooks.append(RoutingHook(run))
    hooks.append(ReplicaWatch(run))
    if run.is_rank_0:
        hooks += [PlanWatch(run.expected), DeadExperts(run.model, run.expert_layers, run.model.num_experts)]
        hooks.append(Collapse(run.model, run.expert_layers))
    if run.is_rank_0 and run.config.train.compile == "on":
        hooks.append(CompileWatch())
    return hooks

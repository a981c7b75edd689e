"""What stands beside a training step, a file each, and the list of it."""

from __future__ import annotations

from launcher.training.hook import StepHook
from launcher.training.hooks.audit import StepAudit
from launcher.training.hooks.compiling import CompileWatch
from launcher.training.hooks.dead_experts import DeadExperts
from launcher.training.hooks.message_sums import MessageSums
from launcher.training.hooks.non_finite import NonFinite
from launcher.training.hooks.plan import PlanWatch
from launcher.training.hooks.replicas import ReplicaWatch
from launcher.training.hooks.routing import Routing
from launcher.training.hooks.stop import StopTogether
from launcher.training.run import Run


def step_hooks(run: Run) -> list[StepHook]:
    """Those of a run, in the order in which they are called.

    First what decides about the step, then what looks for wrong numbers, the audit before what compares ranks; last
    what reports.
    """
    hooks: list[StepHook] = [StopTogether(run), NonFinite(run), StepAudit(run)]
    if run.mesh.comm.ledger is not None:
        hooks.append(MessageSums(run, run.mesh.comm.ledger))
    if run.routing.active:
        hooks.append(Routing(run))
    hooks.append(ReplicaWatch(run))
    if run.is_rank_0:
        hooks += [PlanWatch(run.expected), DeadExperts(run.model, run.expert_layers, run.model.num_experts)]
    if run.is_rank_0 and run.config.train.compile == "on":
        hooks.append(CompileWatch())
    return hooks

"""Check that messages between ranks arrive unchanged; the run ends otherwise (``parallel.check_rows``)."""

from __future__ import annotations

from launcher.training.failure_report import newest_complete_checkpoint, way_out
from launcher.training.hook import RunningStep, StepHook
from launcher.training.run_state import TrainingRun
from longctx.errors import ClusterError
from parallel.comm.messages.ledger import Ledger, is_balanced
from parallel.comm.messages.message_errors import find_differences
from parallel.comm.world import sum_over_ranks

_MESSAGES = "messages"


class MessageChecksums(StepHook):
    """Hook that compares sent and received messages, as part of the step's own sums."""

    def __init__(self, run: TrainingRun, ledger: Ledger) -> None:
        self._run, self._ledger = run, ledger

    def before_forward(self, step: RunningStep) -> None:
        """Add the message balance to the step's sums."""
        step.before_micro_batch.append(self._ledger.begin)
        step.extra_sums[_MESSAGES] = self._ledger.balance

    def before_update(self, step: RunningStep) -> None:
        """Raise ClusterError if bytes changed in transit: their gradient must not reach the weights."""
        # Part of the step's only all-reduce, so the check costs no collective.
        if not is_balanced(step.totals.summed[_MESSAGES]):
            state = "The update was not applied: weights, moments and checkpoints are unchanged."
            raise mismatch_error(self._run, f"step {step.number}", state)
        self._ledger.reset()


def check_validation_messages(run: TrainingRun, step: int) -> None:
    """Reset the ledger after a validation; raise ClusterError if any message changed in transit. Collective."""
    ledger = run.mesh.comm.ledger
    if ledger is None:
        return
    if not is_balanced(sum_over_ranks(ledger.balance(run.device))):
        state = "Its result is not recorded; the step itself is valid."
        raise mismatch_error(run, f"the validation after step {step}", state)
    ledger.reset()


def mismatch_error(run: TrainingRun, phase: str, state: str) -> ClusterError:
    """Return the error that ends the run, the same on every rank. Collective."""
    assert run.mesh.comm.ledger is not None
    found = find_differences(run.mesh.comm.ledger)
    return ClusterError(
        f"in {phase}, messages between ranks changed in transit (parallel.check_rows).\n{found}\n{state}\n"
        f"{way_out(newest_complete_checkpoint(run))}.\nIf it recurs between the same ranks, remove one rank's machine "
        "from the hostfile, then the other's."
    )

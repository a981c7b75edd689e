"""What ranks sent one another in a step arrived as it was sent, or the run ends (``parallel.check_rows``)."""

from __future__ import annotations

from launcher.training.hook import Step, StepHook
from launcher.training.messages import differing
from launcher.training.run import Run
from parallel.comm.messages.ledger import Ledger, is_balanced

_MESSAGES = "messages"


class MessageSums(StepHook):
    """Compares what was sent with what arrived, in the step's own sums."""

    def __init__(self, run: Run, ledger: Ledger) -> None:
        self._run, self._ledger = run, ledger

    def before_forward(self, step: Step) -> None:
        """Have the balance summed with what the step reports."""
        step.each_micro_batch.append(self._ledger.begin)
        step.summed[_MESSAGES] = self._ledger.balance

    def before_update(self, step: Step) -> None:
        """ClusterError if bytes changed on their way: a gradient of them must not reach the weights."""
        if not is_balanced(step.totals.summed[_MESSAGES]):
            state = "The step was not taken: weights, moments and checkpoints are those of the step before."
            raise differing(self._run, f"step {step.number}", state)
        self._ledger.settle()

"""Messages between ranks that did not arrive as they were sent: what ends a run before it trains on with them."""

from __future__ import annotations

from launcher.training.run import Run
from longctx.checkpoint_format import list_checkpoints
from longctx.errors import ClusterError
from parallel.loss import sum_over_ranks
from parallel.runtime.messages.differences import find_differences
from parallel.runtime.messages.ledger import is_balanced


def settle_step(run: Run, step: int, *, all_arrived: bool) -> None:
    """Begin a new ledger where all messages of a step arrived as they were sent; else ClusterError. Collective.

    Comes before the step's update: nothing has changed yet.
    """
    if run.mesh.ledger is None:
        return
    if not all_arrived:
        state = "The step was not taken: weights, moments and checkpoints are those of the step before."
        raise _differing(run, f"step {step}", state)
    run.mesh.ledger.settle()


def settle_between_steps(run: Run, what: str, step: int) -> None:
    """The same of what was sent for ``what`` after a step, such as its validation. Collective."""
    ledger = run.mesh.ledger
    if ledger is None:
        return
    if not is_balanced(sum_over_ranks(ledger.balance(run.device))):
        raise _differing(run, f"{what} after step {step}", "Its result is not recorded; the step itself is whole.")
    ledger.settle()


def _differing(run: Run, when: str, state: str) -> ClusterError:
    """What ends the run, the same on every rank."""
    assert run.mesh.ledger is not None
    found = find_differences(run.mesh.ledger)
    # The newest checkpoint may be one that is being written.
    run.saver.finish()
    newest = next(reversed(list_checkpoints(run.folder)), None)
    go_on = "There is no checkpoint yet: start again."
    if newest is not None:
        go_on = f"Go on from the newest checkpoint, {newest} (--run.resume latest)."
    return ClusterError(
        f"in {when}, messages between ranks did not arrive as they were sent (parallel.check_rows).\n{found}\n"
        f"{state}\n{go_on}\nWhere it comes again between the same ranks, take the machine of one of "
        "them out of the hostfile, then that of the other."
    )

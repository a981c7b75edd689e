"""Messages between ranks that did not arrive as they were sent: what ends a run before it trains on with them."""

from __future__ import annotations

from launcher.training.run import Run
from launcher.training.verdict import newest_checkpoint
from longctx.errors import ClusterError
from parallel.comm.messages.differences import find_differences
from parallel.comm.messages.ledger import is_balanced
from parallel.comm.world import sum_over_ranks


def settle_between_steps(run: Run, what: str, step: int) -> None:
    """Begin a new ledger if all that was sent for ``what``, such as a validation, arrived as it was sent.

    ClusterError otherwise. Collective.
    """
    ledger = run.mesh.comm.ledger
    if ledger is None:
        return
    if not is_balanced(sum_over_ranks(ledger.balance(run.device))):
        raise differing(run, f"{what} after step {step}", "Its result is not recorded; the step itself is whole.")
    ledger.settle()


def differing(run: Run, when: str, state: str) -> ClusterError:
    """Return what ends the run, the same on every rank. Collective."""
    assert run.mesh.comm.ledger is not None
    found = find_differences(run.mesh.comm.ledger)
    newest = newest_checkpoint(run)
    go_on = "There is no checkpoint yet: start again."
    if newest is not None:
        go_on = f"Go on from the newest checkpoint, {newest} (--run.resume latest)."
    return ClusterError(
        f"in {when}, messages between ranks did not arrive as they were sent (parallel.check_rows).\n{found}\n"
        f"{state}\n{go_on}\nWhere it comes again between the same ranks, take the machine of one of "
        "them out of the hostfile, then that of the other."
    )

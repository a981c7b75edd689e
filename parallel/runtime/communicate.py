"""A collective that fails says what was under way."""

from __future__ import annotations

from collections.abc import Callable

from longctx.errors import ClusterError
from parallel.runtime.watch.spans import DOING


def named_collective(action: Callable, described: str):
    """What ``action`` returns; a ClusterError that says what was under way where communication fails."""
    # ``spans.waiting`` unfolded: this runs at each hop of each layer.
    before, DOING.wait = DOING.wait, described
    DOING.count += 1
    try:
        return action()
    except RuntimeError as error:
        # gloo and NCCL name neither what was sent nor to whom; the first line of theirs is the cause.
        raise ClusterError(
            f"{described} ({DOING.place()}): {str(error).splitlines()[0]}\n"
            "A rank that it works with died or did not answer in time (run.timeout_seconds); its own log says why."
        ) from error
    finally:
        DOING.wait = before
        DOING.count += 1

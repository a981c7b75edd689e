"""``History``: statistics over previous steps, used to detect spikes and to count skipped steps."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any

from longctx.errors import CheckpointError

WINDOW = 128
"""Recent completed steps against which a spike is measured."""
LEAST = 32
"""Minimum number of steps for a spike: at its beginning a run's loss falls fast."""


@dataclass(frozen=True)
class History:
    """Losses and gradient norms from the last completed steps, and the number of skipped steps.

    It is the same on every rank, and part of a checkpoint. Skipped steps do not enter losses and norms: a single NaN
    would be in every mean from then on (OLMo-core skipped 129 steps after one).
    """

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    skipped: int = 0
    """Skipped steps in the run; the optimizer has taken that many fewer."""
    in_row: int = 0
    """Consecutive skipped steps at the end."""

    def taken(self, loss: float, norm: float) -> History:
        """Return the history after a completed step. A step without counted tokens has loss NaN and is not added."""
        if math.isnan(loss):
            return replace(self, in_row=0)
        # Bounded, because every checkpoint stores it.
        losses, norms = (*self.losses, loss)[-WINDOW:], (*self.norms, norm)[-WINDOW:]
        return replace(self, losses=losses, norms=norms, in_row=0)

    def left_out(self) -> History:
        """Return the history after a skipped step."""
        return replace(self, skipped=self.skipped + 1, in_row=self.in_row + 1)

    def spike(self, loss: float, norm: float, sigmas: float) -> str:
        """Describe by how much a step's loss or norm exceeds the previous ones; empty if it is no spike.

        A spike is more than ``sigmas`` standard deviations above their mean; 0 disables detection.
        """
        if not sigmas or len(self.losses) < LEAST:
            return ""
        for name, value, before in (("loss", loss, self.losses), ("gradient norm", norm, self.norms)):
            mean = statistics.fmean(before)
            deviation = statistics.pstdev(before, mean)
            if value > mean + sigmas * deviation:
                return (
                    # A constant history has a deviation of 0.
                    f"{name} {value:.4g}, {(value - mean) / max(deviation, 1e-30):.1f} standard deviations above the "
                    f"mean {mean:.4g} of the last {len(before)} steps"
                )
        return ""

    def state(self) -> dict[str, Any]:
        """Return the history as stored in a checkpoint."""
        return asdict(self)

    @classmethod
    def of(cls, training: dict[str, Any]) -> History:
        """Read the history from a checkpoint's ``training``; raise CheckpointError if it is malformed.

        Checkpoints from earlier releases lack it: their runs never skipped a step.
        """
        state = training.get("history")
        if state is None:
            return cls()
        try:
            history = cls(tuple(state["losses"]), tuple(state["norms"]), state["skipped"], state["in_row"])
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"the checkpoint's history is damaged: {error!r}. Use another one.") from error
        numbers = (*history.losses, *history.norms)
        counts = (history.skipped, history.in_row)
        # type(), not isinstance(): in Python True is an int.
        if (
            not all(type(value) is float and math.isfinite(value) for value in numbers)
            or not all(type(count) is int and count >= 0 for count in counts)
            or len(history.losses) != len(history.norms)
            or len(history.losses) > WINDOW
        ):
            raise CheckpointError("the checkpoint's history is damaged: a run keeps up to 128 losses and norms.")
        return history

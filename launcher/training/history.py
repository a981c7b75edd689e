"""``History``: statistics of previous steps, used to detect spikes and to count steps that were left out."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any

from longctx.errors import CheckpointError

WINDOW = 128
"""Steps that a spike is measured against: the last ones that were taken."""
LEAST = 32
"""With fewer of them nothing is a spike: at its beginning a run falls fast."""


@dataclass(frozen=True)
class History:
    """Losses and gradient norms of the last completed steps, and the number of steps that were left out.

    It is the same on every rank, and part of a checkpoint. Steps that were left out are not among the losses and norms:
    a single NaN would be in every mean from then on (OLMo-core skipped 129 steps after one).
    """

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    skipped: int = 0
    """Steps of the run that were left out: the optimiser has taken so many less."""
    in_row: int = 0
    """How many of these are the last ones."""

    def taken(self, loss: float, norm: float) -> History:
        """Return the history after a completed step. A step without counted tokens has loss NaN and is not added."""
        if math.isnan(loss):
            return replace(self, in_row=0)
        losses, norms = (*self.losses, loss)[-WINDOW:], (*self.norms, norm)[-WINDOW:]
        return replace(self, losses=losses, norms=norms, in_row=0)

    def left_out(self) -> History:
        """Return the history after a step that was left out."""
        return replace(self, skipped=self.skipped + 1, in_row=self.in_row + 1)

    def spike(self, loss: float, norm: float, sigmas: float) -> str:
        """Describe by how much a step's loss or norm exceeds the previous ones; empty if it is not a spike.

        A spike is more than ``sigmas`` standard deviations above their mean; with 0 there are none.
        """
        if not sigmas or len(self.losses) < LEAST:
            return ""
        for name, value, before in (("loss", loss, self.losses), ("gradient norm", norm, self.norms)):
            mean = statistics.fmean(before)
            deviation = statistics.pstdev(before, mean)
            if value > mean + sigmas * deviation:
                return (
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

        Checkpoints of earlier releases have none: their runs never left out a step.
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

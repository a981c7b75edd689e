"""``Stash``: what attention computed once, kept through recomputation."""

from __future__ import annotations

from torch import Tensor


class Stash:
    """One layer's output and log-sum-exp, from its first run to the end of its backward.

    Activation checkpointing runs a layer's forward a second time. A core asks ``recall`` first: during the second run it
    returns what the first run kept, and neither kernel nor communication is needed again.
    """

    def __init__(self) -> None:
        self._kept: tuple[Tensor, ...] | None = None
        self.replaying = False
        """Whether the layer is being recomputed."""

    def recall(self) -> tuple[Tensor, ...] | None:
        """What the first run kept, once; None in the first run itself."""
        if not self.replaying:
            return None
        assert self._kept is not None, "a layer is recomputed that kept nothing"
        kept, self._kept = self._kept, None
        return kept

    def keep(self, *tensors: Tensor) -> None:
        """Keep these for the second run."""
        self._kept = tensors

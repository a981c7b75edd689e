"""``LossSum``: what an objective returns of one micro-batch on one rank; ``Term``, what one of its sums is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longctx.model.experts.router import RouterDiagnostics


@dataclass(frozen=True)
class Term:
    """One sum of an objective."""

    name: str
    count: str
    """The name of the count that divides it: a sum over ranks over a count over the same."""
    weight: float | None = None
    """What the loss has it with; None if it is reported alone."""


@dataclass(frozen=True)
class LossSum:
    """Sums over this rank's tokens; divided by the step's global counts they are the step's losses."""

    sums: dict[str, Tensor]
    """By the objective's terms, in their order: float32 scalars, with gradient if the loss has them."""
    counts_LE: Tensor | None = None
    """This rank's tokens by layer and expert, padding excluded, int64; None without routers."""
    diagnostics: RouterDiagnostics | None = None
    """Of the routers, each [L]."""

    def __getitem__(self, name: str) -> Tensor:
        """The sum of this name."""
        return self.sums[name]

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them in a plain tuple, the only kind that ZeRO-3's hooks look into."""
        tensors = tuple(self.sums.values())
        if self.counts_LE is None or self.diagnostics is None:
            return tensors
        # Flat: the routers' figures follow the sums.
        return tensors + (self.counts_LE,) + tuple(self.diagnostics)  # noqa: RUF005

"""A step's sums over its micro-batches and over all ranks.

Axes: L expert layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longctx.model.experts.router import RouterDiagnostics
from longctx.objectives.task import LossSum
from parallel.comm.world import sum_over_ranks


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """A step's sums over all ranks and micro-batches: the same on every rank, known before the update."""

    sums: Mapping[str, float]
    """The task's terms."""
    counts_LE: Tensor
    """Tokens per expert, by layer, int64; [0, 0] in a dense model."""
    diagnostics: RouterDiagnostics
    """Router statistics, each [L]."""
    flops: float
    """Model FLOPs."""
    summed: Mapping[str, Tensor] = field(default_factory=dict)
    """Sums that hooks requested, by name; on the CPU."""

    @property
    def finite(self) -> bool:
        """True if all terms of the loss are finite."""
        return all(map(math.isfinite, self.sums.values()))

    def non_finite_routers(self, layers: Sequence[int]) -> list[str]:
        """Return expert layers with non-finite router logits, and their token counts; the same on every rank."""
        counts = zip(layers, self.diagnostics.non_finite_tokens.tolist(), strict=True)
        return [f"model.layers.{layer} ({int(count):,} tokens)" for layer, count in counts if count]


class StepSums:
    """This rank's sums over a step's micro-batches; they stay on its device until ``over_ranks``."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._sums: tuple[Tensor, ...] | None = None

    def add(self, loss: LossSum) -> None:
        """Add a micro-batch."""
        # float64, so that the reported loss barely depends on how the step is divided into micro-batches.
        scalars = torch.stack([x.detach().double() for x in loss.sums.values()])
        counts_LE, diagnostics = loss.counts_LE, loss.diagnostics
        if counts_LE is None or diagnostics is None:
            counts_LE = scalars.new_zeros(0, 0, dtype=torch.int64)
            diagnostics = RouterDiagnostics.none(scalars, 0)
        own = (scalars, counts_LE, torch.stack(diagnostics))
        self._names = tuple(loss.sums)
        if self._sums is None:
            self._sums = own
        else:
            self._sums = tuple(a + b for a, b in zip(self._sums, own, strict=True))

    def finite(self) -> bool:
        """Return True if this rank's loss sums and router logits are finite. Waits for the device."""
        assert self._sums is not None
        scalars, _, diagnostics = self._sums
        return bool(scalars.isfinite().all()) and not RouterDiagnostics._make(diagnostics).non_finite_tokens.any()

    def over_ranks(self, flops: float, summed: Mapping[str, Callable[[torch.device], Tensor]]) -> StepTotals:
        """Return sums over all ranks for these values, for ``flops``, and for the numbers [n] in ``summed``, by name.

        Collective: a single one for everything that a step reports.
        """
        assert self._sums is not None
        scalars, counts_LE, diagnostics_4L = self._sums
        additions = {name: numbers(scalars.device) for name, numbers in summed.items()}
        # float64 holds integers up to 2^53, so counts stay exact.
        parts = [
            scalars,
            counts_LE.flatten().double(),
            diagnostics_4L.flatten().double(),
            scalars.new_tensor((flops,)),
            *(numbers.double() for numbers in additions.values()),
        ]
        # One small all-reduce per step instead of one per quantity. It runs on the device after the backward pass, and
        # the host waits for it once: the update may not begin before the step is known to be finite.
        flat = sum_over_ranks(torch.cat(parts)).cpu()
        sizes = [len(scalars), counts_LE.numel(), diagnostics_4L.numel(), 1, *map(len, additions.values())]
        own, *rest = flat.split(sizes)
        return StepTotals(
            sums=dict(zip(self._names, own.tolist(), strict=True)),
            counts_LE=rest[0].long().view(counts_LE.shape),
            diagnostics=RouterDiagnostics._make(rest[1].view(diagnostics_4L.shape)),
            flops=float(rest[2]),
            summed=dict(zip(additions, rest[3:], strict=True)),
        )

"""``Task``: the unit of training, a network and its objective in one forward pass, and the loss from its sums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from longctx.batch import Batch, Stream
from longctx.model.decoder import Decoder
from longctx.model.experts.router import RouterDiagnostics
from longctx.model.training_pass import TrainingPass

Counts = Mapping[str, int]
"""Denominators by name, in one order."""


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
    """Sums over this rank's tokens; divided by the step's global counts, they are the step's losses."""

    sums: dict[str, Tensor]
    """By the objective's terms, in their order: float32 scalars, with gradient if the loss has them."""
    counts_LE: Tensor | None = None
    """This rank's tokens by layer and expert, padding excluded, int64; None without routers."""
    diagnostics: RouterDiagnostics | None = None
    """Of the routers, each [L]."""

    def __getitem__(self, name: str) -> Tensor:
        """Return the sum of this name."""
        return self.sums[name]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all sums in a plain tuple, the only kind that ZeRO-3's hooks inspect."""
        tensors = tuple(self.sums.values())
        if self.counts_LE is None or self.diagnostics is None:
            return tensors
        # Flat: the routers' figures follow the sums.
        return tensors + (self.counts_LE,) + tuple(self.diagnostics)  # noqa: RUF005


class Countable(Protocol):
    """Micro-batch, or a rank\'s part of one, before or after ``prepare``. Its counts need no device."""

    @property
    def num_targets(self) -> int:
        """Number of tokens with a following token in their document; for a prepared batch, with a target."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are not padding."""
        ...

    @property
    def num_pairs(self) -> int:
        """Number of documents of two segments with their first token here."""
        ...

    def num_ahead(self, most: int) -> int:
        """Return how often these targets can be predicted from 1, 2, … ``most`` tokens before their own positions."""
        ...


class Task(nn.Module):
    """Single module wrapped by ZeRO: it sees every use of a parameter. The trainer uses only this interface."""

    terms: tuple[Term, ...]
    """Its sums, in the order in which they are returned and added up over ranks."""
    reported: str
    """The sum that is the run's loss to its readers."""

    def __init__(self, network: Decoder) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Batch, training_pass: TrainingPass | None = None) -> tuple[Tensor, ...]:
        """Return ``LossSum.tensors``: a plain tuple, which ZeRO-3's hooks can inspect."""
        raise NotImplementedError

    def token_nll(self, batch: Batch) -> Tensor:
        """Return each token's negative log-likelihood [B, t], float32, without gradient; 0 if its target is ignored.

        Validation sums these by position and source.
        """
        raise NotImplementedError

    def prepare(self, stream: Stream) -> Batch:
        """Return the batch of a stream: make the targets, on the stream's device.

        The stream has only this rank's tokens, each with the next one (``following``), and its runs may end anywhere.
        Data from farther away needs a callable of ``build_objective``; then this is collective.
        """
        raise NotImplementedError

    def denominators(self, batch: Countable) -> dict[str, int]:
        """Return this rank's part of the counts that divide its terms, including ``tokens`` (not padding).

        A run calls this before ``prepare``, on the CPU, so the counts depend only on the compact batch.
        """
        raise NotImplementedError

    def loss_sum(self, tensors: Sequence[Tensor]) -> LossSum:
        """Return the tensors of ``forward`` by name."""
        # In the order of the terms; the remaining ones are the routers' figures.
        count = len(self.terms)
        sums = {term.name: x for term, x in zip(self.terms, tensors, strict=False)}
        if len(tensors) == count:
            return LossSum(sums)
        return LossSum(sums, tensors[count], RouterDiagnostics._make(tensors[count + 1 :]))

    def loss(self, sums: LossSum, counts: Counts) -> Tensor:
        """Return the contribution of one rank's micro-batch to the step's loss; all contributions add up to the loss.

        ``counts`` are those of the step over all ranks. Every sum is divided by a global count, which makes the loss
        independent of parallel degrees, accumulation and packing.
        """
        return weighed(self.terms, sums, counts)

    def mean_loss(self, sums: Mapping[str, float], counts: Counts) -> float:
        """Return the loss to report from sums over all ranks; NaN if no token counts."""
        if not self.num_counted(counts):
            return math.nan
        return sums[self.reported] / self.num_counted(counts)

    def num_counted(self, counts: Counts) -> int:
        """Return the number of tokens that the reported loss averages over."""
        return counts[next(term.count for term in self.terms if term.name == self.reported)]

    def count(self, batches: Iterable[Countable]) -> dict[str, int]:
        """Return the sum of ``denominators`` over several micro-batches."""
        total: dict[str, int] = {}
        for batch in batches:
            for name, count in self.denominators(batch).items():
                total[name] = total.get(name, 0) + count
        return total


def weighed(terms: Sequence[Term], sums: LossSum, counts: Counts) -> Tensor:
    """Return Σ weight · sum / count over the terms of the loss."""
    of_counts: dict[str, Tensor] = {}
    for term in terms:
        if term.weight is None:
            continue
        part = term.weight * sums[term.name]
        # Terms with the same count are added first, so that each count needs one division.
        if term.count in of_counts:
            part = of_counts[term.count] + part
        of_counts[term.count] = part
    # A step with only padding has a loss of 0.
    means = [total / max(1, counts[name]) for name, total in of_counts.items()]
    loss = means[0]
    for mean in means[1:]:
        loss = loss + mean
    return loss

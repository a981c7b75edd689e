"""``Task``: what is trained, a network and its objective in one forward pass, and how its sums become a loss."""

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


class Countable(Protocol):
    """A micro-batch, or a rank\'s part of one, before ``prepare`` or after it. Its counts need no device."""

    @property
    def num_targets(self) -> int:
        """Tokens that one follows in their document; of a prepared batch, those that have a target."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        ...

    @property
    def num_pairs(self) -> int:
        """Documents of two segments whose first token is here."""
        ...

    def num_ahead(self, most: int) -> int:
        """How often these targets can be predicted from 1, 2, … ``most`` tokens before their own places."""
        ...


class Task(nn.Module):
    """The one module that ZeRO wraps: it sees every use of a parameter. What trains knows a task by nothing else."""

    terms: tuple[Term, ...]
    """Its sums, in the order in which they are returned and added up over ranks."""
    reported: str
    """The sum that is the run's loss to its readers."""

    def __init__(self, network: Decoder) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Batch, training_pass: TrainingPass | None = None) -> tuple[Tensor, ...]:
        """``LossSum.tensors``: a plain tuple, which ZeRO-3's hooks can look into."""
        raise NotImplementedError

    def token_nll(self, batch: Batch) -> Tensor:
        """Each token's negative log-likelihood [B, t], float32, without gradient; 0 where its target is ignored.

        Validation adds these up by position and source.
        """
        raise NotImplementedError

    def prepare(self, stream: Stream) -> Batch:
        """Return the batch of a stream: makes the targets, on the stream's device.

        The stream is this rank's tokens alone, each with the one behind it (``following``), and its runs end anywhere.
        Whatever lies farther away needs a callable of ``build_objective``; then this is collective.
        """
        raise NotImplementedError

    def denominators(self, batch: Countable) -> dict[str, int]:
        """Return this rank's part of the counts that its terms are divided by, ``tokens`` (not padding) among them.

        A run asks before ``prepare``, on the CPU, so they follow from what travels.
        """
        raise NotImplementedError

    def loss_sum(self, tensors: Sequence[Tensor]) -> LossSum:
        """What ``forward`` returned, by name."""
        # In the order of the terms; what is left are the routers' figures.
        count = len(self.terms)
        sums = {term.name: x for term, x in zip(self.terms, tensors, strict=False)}
        if len(tensors) == count:
            return LossSum(sums)
        return LossSum(sums, tensors[count], RouterDiagnostics._make(tensors[count + 1 :]))

    def loss(self, sums: LossSum, counts: Counts) -> Tensor:
        """What one micro-batch of one rank adds to the step's loss: over all of them, these add up to the loss.

        ``counts`` are those of the step over all ranks. Every sum is divided by a global count: that is what makes the
        loss independent of degrees, accumulation and packing.
        """
        return weighed(self.terms, sums, counts)

    def mean_loss(self, sums: Mapping[str, float], counts: Counts) -> float:
        """The loss to report, of sums over all ranks; NaN if no token counts."""
        if not self.num_counted(counts):
            return math.nan
        return sums[self.reported] / self.num_counted(counts)

    def num_counted(self, counts: Counts) -> int:
        """Return how many tokens the reported loss is a mean over."""
        return counts[next(term.count for term in self.terms if term.name == self.reported)]

    def count(self, batches: Iterable[Countable]) -> dict[str, int]:
        """``denominators`` of several micro-batches."""
        total: dict[str, int] = {}
        for batch in batches:
            for name, count in self.denominators(batch).items():
                total[name] = total.get(name, 0) + count
        return total


def weighed(terms: Sequence[Term], sums: LossSum, counts: Counts) -> Tensor:
    """Σ weight · sum / count over the terms that the loss has."""
    of_counts: dict[str, Tensor] = {}
    for term in terms:
        if term.weight is None:
            continue
        part = term.weight * sums[term.name]
        # Terms of one count are added before they are divided: one division for each.
        if term.count in of_counts:
            part = of_counts[term.count] + part
        of_counts[term.count] = part
    # A step of nothing but padding has a loss of 0.
    means = [total / max(1, counts[name]) for name, total in of_counts.items()]
    loss = means[0]
    for mean in means[1:]:
        loss = loss + mean
    return loss

"""``Task``: the unit of training. One forward pass through network and objective, and the loss from its sums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from longctx.batch import Batch, Stream
from longctx.model.decoder import Decoder
from longctx.model.experts.router import RouterDiagnostics
from longctx.model.training_pass import TrainingPass

Counts = Mapping[str, int]
"""Denominators by name, in a fixed order."""


@dataclass(frozen=True)
class Term:
    """One of an objective's sums."""

    name: str
    count: str
    """Name of the count that divides it; both are summed over the same ranks."""
    weight: float | None = None
    """Weight in the loss; None if it is only reported."""


@dataclass(frozen=True)
class LossSum:
    """Sums over this rank's tokens; divided by the step's global counts, they give the step's losses."""

    sums: dict[str, Tensor]
    """Keyed and ordered like the objective's terms: float32 scalars, with gradient if they are part of the loss."""
    counts_LE: Tensor | None = None
    """This rank's tokens per layer and expert, without padding, int64; None without routers."""
    diagnostics: RouterDiagnostics | None = None
    """Router diagnostics, [L] each."""

    def __getitem__(self, name: str) -> Tensor:
        """Return the sum with this name."""
        return self.sums[name]

    def tensors(self) -> tuple[Tensor, ...]:
        """Flatten all sums into a plain tuple, the only kind that ZeRO-3's hooks inspect."""
        tensors = tuple(self.sums.values())
        if self.counts_LE is None or self.diagnostics is None:
            return tensors
        return tensors + (self.counts_LE,) + tuple(self.diagnostics)  # noqa: RUF005


class TokenScores(NamedTuple):
    """Scores of a batch's targets."""

    nll_Bt: Tensor
    """Negative log-likelihood [B, t], float32, without gradient; 0 if the target is ignored."""
    right_Bt: Tensor | None = None
    """True if the target is the most likely prediction, bool [B, t]; None if that was not computed."""
    targets_Bt: Tensor | None = None
    """What is scored, ``IGNORED_TARGET`` at all other tokens; None for the batch's targets."""
    accuracy: str = "class_accuracy"
    """Name of the share of ``right_Bt``."""


class Countable(Protocol):
    """A micro-batch or this rank's shard, before or after ``prepare``. Counting needs no device."""

    @property
    def num_targets(self) -> int:
        """Tokens with a following token in their document; in a prepared batch, tokens with a target."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        ...

    @property
    def num_labels(self) -> int:
        """Labelled documents with their first token on this rank."""
        ...

    def num_mtp_targets(self, most: int) -> int:
        """Count how often these targets can be predicted from 1, 2, … ``most`` tokens before their own positions."""
        ...


class Task(nn.Module):
    """The single module that ZeRO wraps: it sees every parameter use. The trainer uses only this interface."""

    terms: tuple[Term, ...]
    """Sums, in the order in which they are returned and reduced over ranks."""
    reported: str
    """Name of the sum reported as the run's loss."""

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

    def score(self, batch: Batch) -> TokenScores:
        """Return the targets' negative log-likelihoods, for classes also whether they are the most likely ones."""
        return TokenScores(self.token_nll(batch))

    def prepare(self, stream: Stream) -> Batch:
        """Build a stream's batch: create the targets on the stream's device.

        The stream only has this rank's tokens, each with the next one (``following``), and its spans may end anywhere.
        Data from farther away needs a callable from ``build_objective``, which makes this call collective.
        """
        raise NotImplementedError

    def denominators(self, batch: Countable) -> dict[str, int]:
        """Return this rank's portion of the counts that divide its terms, including ``tokens`` (without padding).

        A run calls this before ``prepare``, on the CPU, so the counts depend only on the compact batch.
        """
        raise NotImplementedError

    def loss_sum(self, tensors: Sequence[Tensor]) -> LossSum:
        """Unflatten the tensors from ``forward``."""
        # sums in term order, then the router statistics
        count = len(self.terms)
        sums = {term.name: x for term, x in zip(self.terms, tensors, strict=False)}
        if len(tensors) == count:
            return LossSum(sums)
        return LossSum(sums, tensors[count], RouterDiagnostics._make(tensors[count + 1 :]))

    def loss(self, sums: LossSum, counts: Counts) -> Tensor:
        """Return one rank's micro-batch contribution to the step's loss; all contributions add up to the loss.

        ``counts`` are the step's global counts over all ranks. Dividing by global counts makes the loss independent of
        parallel degrees, accumulation and packing.
        """
        return weighed(self.terms, sums, counts)

    def mean_loss(self, sums: Mapping[str, float], counts: Counts) -> float:
        """Return the loss to report, given sums over all ranks; NaN without counted tokens."""
        if not self.num_loss_tokens(counts):
            return math.nan
        return sums[self.reported] / self.num_loss_tokens(counts)

    def num_loss_tokens(self, counts: Counts) -> int:
        """Return the token count that the reported loss averages over."""
        return counts[next(term.count for term in self.terms if term.name == self.reported)]

    def count(self, batches: Iterable[Countable]) -> dict[str, int]:
        """Sum ``denominators`` over several micro-batches."""
        total: dict[str, int] = {}
        for batch in batches:
            for name, count in self.denominators(batch).items():
                total[name] = total.get(name, 0) + count
        return total


def weighed(terms: Sequence[Term], sums: LossSum, counts: Counts) -> Tensor:
    """Return Σ weight · sum / count over the loss terms."""
    of_counts: dict[str, Tensor] = {}
    for term in terms:
        if term.weight is None:
            continue
        part = term.weight * sums[term.name]
        # add terms with the same count first, so that each count needs one division
        if term.count in of_counts:
            part = of_counts[term.count] + part
        of_counts[term.count] = part
    # a step with only padding has loss 0
    means = [total / max(1, counts[name]) for name, total in of_counts.items()]
    loss = means[0]
    for mean in means[1:]:
        loss = loss + mean
    return loss

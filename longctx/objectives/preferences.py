"""Preferences between replies, the training objective of DPO, IPO, SimPO, ORPO and KTO.

Axes: B rows, t tokens of this rank, S documents of the micro-batch, P records in it, F records with their first reply's
first token on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.batch import IGNORED_TARGET, Batch, PackedDocuments, ReadTokens, Stream, next_tokens
from longctx.errors import ConfigError
from longctx.kernels.dtypes import int64_tensor
from longctx.model.chunks.residual_stream import ResidualStream
from longctx.model.decoder import Decoder
from longctx.model.token_pool import TokenPool
from longctx.objectives.document_labels import LabelledDocuments, ReduceSums
from longctx.objectives.preference_losses import ReplyScores, implicit_rewards, preference_losses
from longctx.objectives.routed_task import RoutedTask, hidden_states, identity, router_terms
from longctx.objectives.task import Countable, Term, TokenScores
from longctx.preference_options import PreferenceOptions


# A preference loss reads sums over whole replies, whose tokens may be on several ranks. The head therefore computes
# their log-likelihoods twice. The first pass has no gradient: its sums are added up over ranks, and every rank
# differentiates the loss by them. The second pass weighs each token's negative log-likelihood by its reply's
# derivative, in the fused loss that never holds all logits:
#
#     ∂L/∂θ = Σ over replies r of ∂L/∂logp(r) · Σ over its tokens of ∂log p(token)/∂θ
#
# This is exact, and the layers below run once.
class Preferences(RoutedTask):
    """Loss of a preference between two replies per record; a record counts once, however long it is."""

    reported = "preference"

    def __init__(
        self,
        network: Decoder,
        reduce_counts: Callable[[Tensor, Batch], Tensor] = identity,
        reduce_sums: ReduceSums = identity,
        *,
        options: PreferenceOptions,
    ) -> None:
        """Set up the objective; every rank calls ``reduce_sums`` in every pass."""
        super().__init__(network, reduce_counts)
        self.reduce_sums, self.options = reduce_sums, options
        names = ["preference", "right_preferences", "margin", "first_reward", "second_reward"]
        if options.kind.needs_reference:
            names.append("kl")
        terms = [Term("objective", "labels", 1.0)] + [Term(name, "labels") for name in names]
        self.terms = tuple(terms + router_terms(network.config))

    def denominators(self, batch: Countable) -> dict[str, int]:
        """Count records and tokens (without padding)."""
        return {"labels": batch.num_labels, "tokens": batch.num_tokens}

    def prepare(self, stream: Stream) -> Batch:
        if stream.labels is None or stream.reference_P2 is None:
            raise ConfigError("train.objective=preferences needs records with two replies; this data has none.")
        return next_tokens(stream)

    def sums_of(
        self,
        found: Any,
        batch: Batch,
        stream: ResidualStream | None,
        mtp_batches: Sequence[tuple[Tensor, Tensor]],
    ) -> dict[str, Tensor]:
        read = None if stream is not None else self.read_tokens(batch)
        nll_Bt = self._token_nll(found, batch, read, stream)
        scores, documents_P2 = self._reply_scores(nll_Bt, batch)
        losses_P, slopes_P2 = self._losses(scores)
        weights_Bt, targets_Bt = _at_tokens(-slopes_P2.to(nll_Bt.dtype), documents_P2, batch), batch.targets
        if read is not None:
            weights_Bt, targets_Bt = (x_Bt.flatten()[read.indices_F][None] for x_Bt in (weights_Bt, targets_Bt))
        weighted, _ = self.network.loss_sums(found, targets_Bt, stream=stream, weights_Bt=weights_Bt)
        # Only the rank with a record's first reply token counts its values; the others add 0.
        records_F, _ = _records_here(batch, documents_P2)
        values = self._values(scores, losses_P)
        sums = {name: of_records_P[records_F].sum().to(weighted.dtype) for name, of_records_P in values.items()}
        # the loss's value, with the weighted sum's gradient
        return sums | {"objective": sums["preference"] + (weighted - weighted.detach())}

    @torch.no_grad()
    def token_nll(self, batch: Batch) -> Tensor:
        """Return each reply token's negative log-likelihood [B, t], without gradient; 0 for all others."""
        read = self.read_tokens(batch)
        return self._token_nll(hidden_states(self.network, batch, read=read), batch, read)

    def read_tokens(self, batch: Batch) -> ReadTokens:
        """Return the tokens that predict a reply's: prompts only serve attention. A GPU waits for the search."""
        return ReadTokens((batch.targets != IGNORED_TARGET).flatten().nonzero().flatten())

    @torch.no_grad()
    def score(self, batch: Batch) -> TokenScores:
        """Return each record's loss, and whether the preferred reply has more reward, at its first reply's first
        token.
        """
        scores, documents_P2 = self._reply_scores(self.token_nll(batch), batch)
        values = self._values(scores, preference_losses(scores, self.options))
        records_F, indices_F = _records_here(batch, documents_P2)
        nll_Bt, right_Bt = (
            values[name].new_zeros(batch.targets.numel()).index_copy_(0, indices_F, values[name][records_F])
            for name in ("preference", "right_preferences")
        )
        nll_Bt, right_Bt = nll_Bt.float().view_as(batch.targets), right_Bt.bool().view_as(batch.targets)
        return TokenScores(nll_Bt, right_Bt, batch.labels, "preference_accuracy")

    @torch.no_grad()
    def reply_sums(self, batch: Batch) -> Tensor:
        """Return the replies' log-likelihoods [P, 2] in float64, equal on all ranks: a reference for other models."""
        return self._reply_scores(self.token_nll(batch), batch)[0].sums

    def _token_nll(
        self, found: Any, batch: Batch, read: ReadTokens | None, stream: ResidualStream | None = None
    ) -> Tensor:
        """Return ``token_nll`` from hidden states of the tokens ``read``, or from a stream's handle."""
        if read is None:
            return self.network.token_nll(found, batch.targets, stream)
        nll_1F = self.network.token_nll(found, batch.targets.flatten()[read.indices_F][None])
        return nll_1F.new_zeros(batch.targets.numel()).index_copy_(0, read.indices_F, nll_1F[0]).view_as(batch.targets)

    @torch.no_grad()
    def _reply_scores(self, nll_Bt: Tensor, batch: Batch) -> tuple[ReplyScores, Tensor]:
        """Return the replies' scores and documents [P, 2], with sums over all ranks' tokens. Collective."""
        documents_P2 = reply_documents(batch.documents).to(nll_Bt.device, non_blocking=True)
        num_sums = batch.documents.num_documents
        numbers_Bt = batch.document_ids.where(batch.document_ids >= 0, num_sums)
        labels_Bt = batch.labels
        assert labels_Bt is not None
        # a single exchange: log-likelihoods, counts, and labels, which only their first token's rank knows
        columns = (-nll_Bt, batch.targets != IGNORED_TARGET, labels_Bt.where(labels_Bt != IGNORED_TARGET, 0))
        values_Bt3 = torch.stack([column.double() for column in columns], -1)
        sums_S3 = TokenPool(numbers_Bt, num_sums).apply(values_Bt3)
        # A rank needs all documents, not only those that it shares: a record's other reply may be elsewhere.
        sums_S3 = self.reduce_sums(sums_S3, replace(batch, placement=None))
        sums_P2, lengths_P2, labels_P2 = sums_S3[documents_P2].unbind(-1)
        assert batch.reference_P2 is not None
        return ReplyScores(sums_P2, lengths_P2, batch.reference_P2, labels_P2[:, 0] > 0), documents_P2

    def _losses(self, scores: ReplyScores) -> tuple[Tensor, Tensor]:
        """Return each record's loss [P] and its derivatives by the replies' log-likelihoods [P, 2]."""
        with torch.enable_grad():
            sums_P2 = scores.sums.detach().requires_grad_()
            losses_P = preference_losses(scores._replace(sums=sums_P2), self.options)
            (slopes_P2,) = torch.autograd.grad(losses_P.sum(), sums_P2)
        return losses_P.detach(), slopes_P2

    def _values(self, scores: ReplyScores, losses_P: Tensor) -> dict[str, Tensor]:
        """Return each record's reported values [P]."""
        rewards_P2 = implicit_rewards(scores, self.options)
        first_P, second_P = rewards_P2.unbind(1)
        margin_P = first_P - second_P
        if not self.options.kind.is_paired:
            margin_P = torch.where(scores.is_desirable_P, margin_P, -margin_P)
        values = {
            "preference": losses_P,
            "right_preferences": (margin_P > 0).double(),
            "margin": margin_P,
            "first_reward": first_P,
            "second_reward": second_P,
        }
        if self.options.kind.needs_reference:
            values["kl"] = -scores.ratios.mean(1)
        return values


def reply_documents(documents: PackedDocuments) -> Tensor:
    """Return the document numbers of each record's two replies, int64 [P, 2] on the CPU, in row order."""
    others = set(documents.prefixes) | set(documents.padding or ())
    replies = [number for number, length in enumerate(documents.lengths) if length and number not in others]
    return int64_tensor(replies).view(-1, 2)


class _Records(NamedTuple):
    numbers_F: Tensor
    indices_F: Tensor
    """First tokens of their first replies, as indices into [B·t]."""


def _records_here(batch: Batch, documents_P2: Tensor) -> _Records:
    """Return the records that this rank counts."""
    indices_F = LabelledDocuments.of(batch).indices_F
    numbers_F = batch.document_ids.flatten()[indices_F]
    return _Records(torch.searchsorted(documents_P2[:, 0].contiguous(), numbers_F), indices_F)


def _at_tokens(values_P2: Tensor, documents_P2: Tensor, batch: Batch) -> Tensor:
    """Return each token's value of its reply [B, t]; 0 for all others."""
    num_documents = batch.documents.num_documents
    of_documents = values_P2.new_zeros(num_documents + 1).index_copy_(0, documents_P2.flatten(), values_P2.flatten())
    return of_documents[batch.document_ids.where(batch.document_ids >= 0, num_documents)]

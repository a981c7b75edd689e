"""Token prediction with balanced experts: everything that objectives over a vocabulary share except their targets.

Axes: B rows, t tokens of this rank, c chosen ones of them, F documents' first tokens, L layers of experts, S documents
of the micro-batch, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longctx.batch import IGNORED_TARGET, Batch
from longctx.config import ModelConfig
from longctx.model.chunks.branch import fork
from longctx.model.chunks.residual_stream import ResidualStream
from longctx.model.decoder import Decoder
from longctx.model.mtp import HeadInput
from longctx.objectives.document_labels import LabelledDocuments, ReduceSums, label_logits, label_sums
from longctx.objectives.routed_task import RoutedTask, hidden_states, identity, router_terms
from longctx.objectives.task import Countable, Term


def prediction_terms(config: ModelConfig, mtp_weight: float = 0.0, class_weight: float = 0.0) -> tuple[Term, ...]:
    """Return the terms for predicted tokens, and for routers, document heads and multi-token prediction if present."""
    terms = [Term("objective", "targets", 1.0), Term("nll", "targets"), *router_terms(config)]
    if config.pair_head != "none":
        terms += Term("pair", "pairs", 1.0), Term("right_pairs", "pairs")
    if config.classes:
        terms += Term("class", "labels", class_weight), Term("right_classes", "labels")
    if config.mtp_layers:
        terms += Term("mtp", "ahead", mtp_weight), Term("mtp_nll", "ahead")
    return tuple(terms)


Shift = Callable[[Tensor, Batch], Tensor]
"""Maps a value per token to the next token's value in the sequence, across ranks."""


def next_values(values_Bt: Tensor, batch: Batch) -> Tensor:
    """Return the following tokens' values, in one process; the last token wraps around to the first."""
    return values_Bt.flatten().roll(-1).view_as(values_Bt)


class TokenPrediction(RoutedTask):
    """Negative log-likelihood per target; subclasses define the targets."""

    reported = "nll"

    def __init__(
        self,
        decoder: Decoder,
        reduce_counts: Callable[[Tensor, Batch], Tensor] = identity,
        reduce_sums: ReduceSums = identity,
        *,
        shift: Shift = next_values,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        mtp_weight: float = 0.0,
        class_weight: float = 0.0,
    ) -> None:
        """Set the loss options: ``mtp_weight`` and ``class_weight`` weigh multi-token prediction and the class head,
        the other two are from ``LossOptions``.

        ``reduce_counts`` as in ``RoutedTask``; ``reduce_sums`` serves a class head on document means, and every rank
        calls it in every pass. ``shift`` is called once or twice per multi-token prediction block.
        """
        super().__init__(decoder, reduce_counts)
        self.terms = prediction_terms(decoder.config, mtp_weight, class_weight)
        self.reduce_sums = reduce_sums if decoder.config.class_pool == "mean" else None
        self.shift = shift
        self.z_loss, self.label_smoothing = z_loss, label_smoothing

    def denominators(self, batch: Countable) -> dict[str, int]:
        """Count targets, tokens (without padding), labelled documents and targets further ahead (MTP)."""
        counts = {"targets": batch.num_targets, "tokens": batch.num_tokens}
        if self.network.pair_head is not None:
            counts["pairs"] = batch.num_labels
        if self.network.class_head is not None:
            counts["labels"] = batch.num_labels
        if self.network.config.mtp_layers:
            counts["ahead"] = batch.num_mtp_targets(self.network.config.mtp_layers)
        return counts

    # ``objective`` is the differentiated loss: label-smoothed negative log-likelihood plus z-loss; ``nll`` is plain,
    # without gradient. ``pair`` and ``class`` are the document heads' losses, and ``right_pairs`` and ``right_classes``
    # count correct predictions. ``mtp`` and ``mtp_nll`` repeat the first two for targets further ahead.
    def sums_of(
        self,
        found: Any,
        batch: Batch,
        stream: ResidualStream | None,
        mtp_batches: Sequence[tuple[Tensor, Tensor]],
    ) -> dict[str, Tensor]:
        hidden_BtM, targets_Bt = found, batch.targets
        if mtp_batches:
            hidden_BtM = found[0].hidden_BtM
        hidden_BtM, further = self._label_sums(hidden_BtM, batch, stream)
        if batch.masked_indices is not None and stream is None:
            hidden_BtM, targets_Bt = _at(hidden_BtM, batch.masked_indices), _at(targets_Bt, batch.masked_indices)
        sums = self._sums(hidden_BtM, targets_Bt, stream)
        if mtp_batches:
            further |= self._mtp_sums(found[1:], [targets_Bt for _, targets_Bt in mtp_batches])
        return sums | further

    def _sums(
        self, hidden_BtM: Tensor, targets_Bt: Tensor, stream: ResidualStream | None, norm: nn.Module | None = None
    ) -> dict[str, Tensor]:
        """Return ``objective`` and ``nll``; ``norm`` as in ``Decoder.loss_sums``."""
        # fused linear cross-entropy, one chunk of tokens at a time: the full logits never exist
        objective_sum, nll_sum = self.network.loss_sums(
            hidden_BtM,
            targets_Bt,
            z_loss=self.z_loss,
            label_smoothing=self.label_smoothing,
            stream=stream,
            norm=norm,
        )
        return {"objective": objective_sum, "nll": nll_sum}

    def mtp_batches(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Return the input tokens and targets for each multi-token prediction block. Collective.

        Token i gets those of token i + 1 in the same document. After a document's last token any value may be read,
        because no counted value depends on it.
        """
        found: list[tuple[Tensor, Tensor]] = []
        tokens_Bt, targets_Bt = batch.next_token_ids, batch.targets
        is_first_Bt = batch.positions == 0
        for number in range(self.network.config.mtp_layers):
            assert tokens_Bt is not None, "the batch has no next_token_ids"
            # The first block reads the following tokens from the data. Mask document starts: their values must not
            # shift into the previous document.
            if number:
                tokens_Bt = self.shift(tokens_Bt.masked_fill(is_first_Bt, IGNORED_TARGET), batch)
            targets_Bt = self.shift(targets_Bt.masked_fill(is_first_Bt, IGNORED_TARGET), batch)
            found.append((tokens_Bt.clamp(min=0), targets_Bt))
        return found

    def _mtp_sums(self, found: Sequence[HeadInput], targets: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return both sums over the targets in all multi-token prediction blocks."""
        # the head's weight accumulates a gradient from each block
        each = [self._sums(x.hidden_BtM, of_x, x.stream, x.norm) for x, of_x in zip(found, targets, strict=True)]
        return {
            "mtp": torch.stack([sums["objective"] for sums in each]).sum(),
            "mtp_nll": torch.stack([sums["nll"] for sums in each]).sum(),
        }

    def _label_sums(
        self, hidden_BtM: Tensor, batch: Batch, stream: ResidualStream | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the token head's input, and the document heads' cross-entropies and counts of correct predictions."""
        network, sums = self.network, dict[str, Tensor]()
        heads = (
            ("pair", "right_pairs", network.pair_head, None),
            ("class", "right_classes", network.class_head, self.reduce_sums),
        )
        for loss, right, head, reduce_sums in heads:
            if head is None:
                continue
            given, copy, documents = hidden_BtM, None, LabelledDocuments.of(batch)
            if stream is not None:
                hidden_BtM, copy, given = fork(stream, hidden_BtM)
            logits_FC = label_logits(network, head, given, batch, documents, reduce_sums, stream=copy)
            found = label_sums(logits_FC, documents)
            sums |= {loss: found.objective, right: found.right}
        return hidden_BtM, sums

    @torch.no_grad()
    def token_nll(self, batch: Batch) -> Tensor:
        """Return each token's negative log-likelihood [B, t], float32, without gradient; 0 if the target is ignored."""
        hidden_BtM, masked_indices = hidden_states(self.network, batch), batch.masked_indices
        if masked_indices is None:
            return self.network.token_nll(hidden_BtM, batch.targets)
        nll_1c = self.network.token_nll(_at(hidden_BtM, masked_indices), _at(batch.targets, masked_indices))
        nll_N = nll_1c.new_zeros(batch.targets.numel()).index_copy_(0, masked_indices, nll_1c[0])
        return nll_N.view_as(batch.targets)


def _at(x_Bt: Tensor, masked_indices: Tensor) -> Tensor:
    """Gather these rows from [B, t, …] into one row."""
    return x_Bt.flatten(0, 1).index_select(0, masked_indices)[None]

"""Token prediction with balanced experts: everything that objectives over a vocabulary share except their targets.

Axes: B rows, t tokens of this rank, c chosen ones of them, F documents' first tokens, L layers of experts, S documents
of the micro-batch, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from longctx.batch import IGNORED_TARGET, Batch, Stream
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.kernels.dtypes import accumulate_dtype
from longctx.model.chunks.residual_stream import ResidualStream, new_stream
from longctx.model.decoder import Decoder, stream_arguments
from longctx.model.experts.balance import balance_sum
from longctx.model.experts.router import RouterDiagnostics
from longctx.model.mtp import HeadInput
from longctx.model.training_pass import TrainingPass
from longctx.objectives.task import Countable, LossSum, Task, Term


def prediction_terms(config: ModelConfig, mtp_weight: float = 0.0) -> tuple[Term, ...]:
    """Return the terms for predicted tokens, and for routers, pair head and multi-token prediction if present."""
    terms = [Term("objective", "targets", 1.0), Term("nll", "targets")]
    if config.num_experts:
        # routers see every token, including a document's last one, which has no target
        terms.append(Term("balance", "tokens", config.balance_loss_weight))
        terms.append(Term("router_z", "tokens", config.router_z_loss_weight))
    if config.pair_head != "none":
        terms += Term("pair", "pairs", 1.0), Term("right_pairs", "pairs")
    if config.mtp_layers:
        terms += Term("mtp", "ahead", mtp_weight), Term("mtp_nll", "ahead")
    return tuple(terms)


Shift = Callable[[Tensor, Batch], Tensor]
"""Maps a value per token to the next token's value in the sequence, across ranks."""


def next_values(values_Bt: Tensor, batch: Batch) -> Tensor:
    """Return the following tokens' values, in one process; the last token wraps around to the first."""
    return values_Bt.flatten().roll(-1).view_as(values_Bt)


def identity(counts_LSE: Tensor, batch: Batch) -> Tensor:
    """Return the counts unchanged: in one process no other rank shares the sequence."""
    return counts_LSE


class TokenPrediction(Task):
    """Negative log-likelihood per target, plus router losses per token; subclasses define the targets."""

    reported = "nll"

    def __init__(
        self,
        decoder: Decoder,
        reduce_counts: Callable[[Tensor, Batch], Tensor] = identity,
        *,
        shift: Shift = next_values,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        mtp_weight: float = 0.0,
    ) -> None:
        """Set the loss options: ``mtp_weight`` weighs multi-token prediction, the other two are from ``LossOptions``.

        ``reduce_counts`` sums int64 counts over ranks that share the batch: [L, S, E], or [L, 1, E] if the micro-batch
        is balanced as one. It is called once per micro-batch with experts, on every rank even without tokens, but never
        if the global batch is balanced. ``shift`` is called once or twice per multi-token prediction block.
        """
        super().__init__(decoder)
        # a run rejects such a config earlier; this check is for models built in code
        if decoder.config.pair_head != "none" and decoder.execution.chunk_tokens:
            raise ConfigError(
                "a pair head needs full hidden states, which chunked layers do not store: set chunk_tokens=0."
            )
        self.terms = prediction_terms(decoder.config, mtp_weight)
        self.reduce_counts, self.shift = reduce_counts, shift
        self.z_loss, self.label_smoothing = z_loss, label_smoothing

    def denominators(self, batch: Countable) -> dict[str, int]:
        """Count targets, tokens (without padding), pairs (pair head) and targets further ahead (MTP)."""
        counts = {"targets": batch.num_targets, "tokens": batch.num_tokens}
        if self.network.pair_head is not None:
            counts["pairs"] = batch.num_labels
        if self.network.config.mtp_layers:
            counts["ahead"] = batch.num_mtp_targets(self.network.config.mtp_layers)
        return counts

    def forward(self, batch: Batch, training_pass: TrainingPass | None = None) -> tuple[Tensor, ...]:
        """Return ``LossSum.tensors`` for the terms.

        ``objective`` is the differentiated loss: label-smoothed negative log-likelihood plus z-loss; ``nll`` is plain,
        without gradient. ``balance`` and ``router_z`` are summed over expert layers and tokens. ``pair`` is the pair
        head's loss, and ``right_pairs`` counts its correct predictions. ``mtp`` and ``mtp_nll`` repeat the first two
        for targets further ahead.
        """
        stream, mtp_batches = new_stream(self.network.execution, batch.tokens), self._mtp_batches(batch)
        found, stats = hidden_states(
            self.network,
            batch,
            training_pass,
            return_stats=True,
            stream=stream,
            mtp_tokens=[tokens_Bt for tokens_Bt, _ in mtp_batches],
        )
        hidden_BtM, targets_Bt = found, batch.targets
        if mtp_batches:
            hidden_BtM = found[0].hidden_BtM
        further: dict[str, Tensor] = {}
        if self.network.pair_head is not None:
            further = self._pair_sums(hidden_BtM, batch)
        if batch.masked_indices is not None and stream is None:
            hidden_BtM, targets_Bt = _at(hidden_BtM, batch.masked_indices), _at(targets_Bt, batch.masked_indices)
        sums = self._sums(hidden_BtM, targets_Bt, stream)
        if mtp_batches:
            further |= self._mtp_sums(found[1:], [targets_Bt for _, targets_Bt in mtp_batches])
        if not stats:
            # a dense model has no routers, on any rank
            return LossSum(sums | further).tensors()
        scope = self.network.config.balance_scope
        load_LE = None
        if training_pass is not None:
            load_LE = training_pass.expert_load_LE

        def reduce_counts(counts_LSE: Tensor) -> Tensor:
            return self.reduce_counts(counts_LSE, batch)

        sums["balance"] = balance_sum(stats, scope=scope, reduce_counts=reduce_counts, load_LE=load_LE)
        # summed over layers: like token sums, these add up over ranks and micro-batches
        sums["router_z"] = torch.stack([layer.z_sum for layer in stats]).sum()
        counts_LE = torch.stack([layer.counts_SE.sum(0) for layer in stats])
        return LossSum(
            sums | further, counts_LE, RouterDiagnostics.stack([layer.diagnostics for layer in stats])
        ).tensors()

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

    def _mtp_batches(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
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

    def _pair_sums(self, hidden_BtM: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the pair head's cross-entropy over this rank's first tokens, and its number of correct predictions."""
        labels, label_indices = batch.labels, batch.label_indices
        if labels is None:
            labels = torch.full_like(batch.tokens, IGNORED_TARGET)
        if label_indices is None:
            label_indices = (labels.flatten() != IGNORED_TARGET).nonzero().flatten()
        # The head also runs on ranks without first tokens: ZeRO gathers its weights on all ranks.
        logits_F2 = self.network.pair_head(_at(hidden_BtM, label_indices)[0])
        labels_F = labels.flatten()[label_indices]
        right = (logits_F2.argmax(1) == labels_F).sum().float()
        logits_F2 = logits_F2.to(accumulate_dtype(logits_F2.dtype))
        return {"pair": functional.cross_entropy(logits_F2, labels_F, reduction="sum"), "right_pairs": right}

    @torch.no_grad()
    def token_nll(self, batch: Batch) -> Tensor:
        """Return each token's negative log-likelihood [B, t], float32, without gradient; 0 if the target is ignored."""
        hidden_BtM, masked_indices = hidden_states(self.network, batch), batch.masked_indices
        if masked_indices is None:
            return self.network.token_nll(hidden_BtM, batch.targets)
        nll_1c = self.network.token_nll(_at(hidden_BtM, masked_indices), _at(batch.targets, masked_indices))
        nll_N = nll_1c.new_zeros(batch.targets.numel()).index_copy_(0, masked_indices, nll_1c[0])
        return nll_N.view_as(batch.targets)


def hidden_states(
    decoder: Decoder,
    batch: Stream,
    training_pass: TrainingPass | None = None,
    *,
    return_stats: bool = False,
    stream: ResidualStream | None = None,
    mtp_tokens: Sequence[Tensor] = (),
) -> Any:
    """Run ``Decoder.forward`` on a batch with all its per-token data, after encoding its source."""
    source = None
    if batch.source is not None:
        source = decoder.encode(batch.source, training_pass)
    return decoder(
        batch.tokens,
        batch.positions,
        batch.documents,
        training_pass=training_pass,
        return_stats=return_stats,
        stream=stream,
        source=source,
        mtp_tokens=mtp_tokens,
        **stream_arguments(batch),
    )


def _at(x_Bt: Tensor, masked_indices: Tensor) -> Tensor:
    """Gather these rows from [B, t, …] into one row."""
    return x_Bt.flatten(0, 1).index_select(0, masked_indices)[None]

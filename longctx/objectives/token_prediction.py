"""Predicting tokens, with balanced experts: all that objectives over a vocabulary share but their targets.

Axes: B rows, t tokens of this rank, c of them that are chosen, F documents' first tokens, L layers of experts, S
documents of the micro-batch, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from longctx.batch import IGNORED_TARGET, Batch, Stream
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.kernels.dtypes import accumulate_dtype
from longctx.model.chunks.stream import ResidualStream, new_stream
from longctx.model.decoder import Decoder
from longctx.model.experts.balance import balance_sum
from longctx.model.experts.router import RouterDiagnostics
from longctx.model.training_pass import TrainingPass
from longctx.objectives.task import Countable, LossSum, Task, Term


def prediction_terms(config: ModelConfig) -> tuple[Term, ...]:
    """The sums of predicted tokens, those of routers only if the model has any."""
    terms = [Term("objective", "targets", 1.0), Term("nll", "targets")]
    if config.num_experts:
        # Routers see every token, also the last one of a document, which has no target.
        terms.append(Term("balance", "tokens", config.balance_loss_weight))
        terms.append(Term("router_z", "tokens", config.router_z_loss_weight))
    if config.pair_head != "none":
        terms += Term("pair", "pairs", 1.0), Term("right_pairs", "pairs")
    return tuple(terms)


def identity(counts_LSE: Tensor, batch: Batch) -> Tensor:
    """The counts as they are: in one process no other rank shares the sequence."""
    return counts_LSE


class TokenPrediction(Task):
    """Negative log-likelihood a target, and what routers add to it a token. A subclass says what the targets are."""

    reported = "nll"

    def __init__(
        self,
        decoder: Decoder,
        reduce_counts: Callable[[Tensor, Batch], Tensor] = identity,
        *,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
    ) -> None:
        """``reduce_counts`` sums int64 counts over the ranks that share the batch: [L, S, E], or [L, 1, E] where the
        micro-batch is balanced as one. Called once a micro-batch of an expert model (never where the global batch is
        balanced), on every rank, also on one that holds no token of it. The other two are ``LossOptions``'."""
        super().__init__(decoder)
        # A run's config is refused before; this is for who builds a model by hand.
        if decoder.config.pair_head != "none" and decoder.execution.chunk_tokens:
            raise ConfigError("a pair head reads hidden states that layers by chunks never have whole: chunk_tokens=0.")
        self.terms = prediction_terms(decoder.config)
        self.reduce_counts = reduce_counts
        self.z_loss, self.label_smoothing = z_loss, label_smoothing

    def denominators(self, batch: Countable) -> dict[str, int]:
        """Targets, tokens that are not padding, and with a pair head the documents of two segments."""
        counts = {"targets": batch.num_targets, "tokens": batch.num_tokens}
        if self.network.pair_head is not None:
            counts["pairs"] = batch.num_pairs
        return counts

    def forward(self, batch: Batch, training_pass: TrainingPass | None = None) -> tuple[Tensor, ...]:
        """``LossSum.tensors`` of the terms.

        ``objective`` is what backward goes through: negative log-likelihood, of smoothed labels, plus z-loss; ``nll``
        is plain, without gradient. ``balance`` and ``router_z`` are summed over layers of experts and tokens. ``pair``
        is what the pair head is trained on, and ``right_pairs`` counts what it says right.
        """
        stream = new_stream(self.network.execution, batch.tokens)
        hidden_BtM, stats = self._run(batch, training_pass, return_stats=True, stream=stream)
        whole_BtM, targets_Bt = hidden_BtM, batch.targets
        if batch.places is not None and stream is None:
            hidden_BtM, targets_Bt = _at(hidden_BtM, batch.places), _at(targets_Bt, batch.places)
        # The head's product and the loss in one op, a block of tokens at a time: logits are never whole.
        objective_sum, nll_sum = self.network.loss_sums(
            hidden_BtM,
            targets_Bt,
            z_loss=self.z_loss,
            label_smoothing=self.label_smoothing,
            stream=stream,
        )
        sums = {"objective": objective_sum, "nll": nll_sum}
        of_pairs: dict[str, Tensor] = {}
        if self.network.pair_head is not None:
            of_pairs = self._pair_sums(whole_BtM, batch)
        if not stats:
            # A dense model has no routers, on any rank.
            return LossSum(sums | of_pairs).tensors()
        scope = self.network.config.balance_scope
        load_LE = None
        if training_pass is not None:
            load_LE = training_pass.expert_load_LE

        def reduce_counts(counts_LSE: Tensor) -> Tensor:
            return self.reduce_counts(counts_LSE, batch)

        sums["balance"] = balance_sum(stats, scope=scope, reduce_counts=reduce_counts, load_LE=load_LE)
        # Over layers: sums of sums, which add up over ranks and micro-batches like those of the tokens.
        sums["router_z"] = torch.stack([layer.z_sum for layer in stats]).sum()
        counts_LE = torch.stack([layer.counts_SE.sum(0) for layer in stats])
        return LossSum(
            sums | of_pairs, counts_LE, RouterDiagnostics.stack([layer.diagnostics for layer in stats])
        ).tensors()

    def _pair_sums(self, hidden_BtM: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy of the pair head over this rank's first tokens, and how many of these it is right about."""
        order, firsts = batch.order, batch.firsts
        if order is None:
            order = torch.full_like(batch.tokens, IGNORED_TARGET)
        if firsts is None:
            firsts = (order.flatten() != IGNORED_TARGET).nonzero().flatten()
        # On a rank without any the head still takes part: ZeRO gathers its weights on all ranks alike.
        logits_F2 = self.network.pair_head(_at(hidden_BtM, firsts)[0])
        order_F = order.flatten()[firsts]
        right = (logits_F2.argmax(1) == order_F).sum().float()
        logits_F2 = logits_F2.to(accumulate_dtype(logits_F2.dtype))
        return {"pair": functional.cross_entropy(logits_F2, order_F, reduction="sum"), "right_pairs": right}

    @torch.no_grad()
    def token_nll(self, batch: Batch) -> Tensor:
        """Each token's negative log-likelihood [B, t], float32, without gradient; 0 where the target is ignored."""
        hidden_BtM, places = self._run(batch, None, return_stats=False), batch.places
        if places is None:
            return self.network.token_nll(hidden_BtM, batch.targets)
        nll_1c = self.network.token_nll(_at(hidden_BtM, places), _at(batch.targets, places))
        nll_N = nll_1c.new_zeros(batch.targets.numel()).index_copy_(0, places, nll_1c[0])
        return nll_N.view_as(batch.targets)

    def _run(
        self,
        batch: Batch,
        training_pass: TrainingPass | None,
        *,
        return_stats: bool,
        stream: ResidualStream | None = None,
    ) -> Any:
        """The decoder's hidden states, and with ``return_stats`` the routers' statistics."""
        return hidden_states(self.network, batch, training_pass, return_stats=return_stats, stream=stream)


def hidden_states(
    decoder: Decoder,
    batch: Stream,
    training_pass: TrainingPass | None = None,
    *,
    return_stats: bool = False,
    stream: ResidualStream | None = None,
) -> Any:
    """``Decoder.forward`` of a batch, its source encoded before: everything that a batch says of its tokens."""
    source = None
    if batch.source is not None:
        source = decoder.encode(batch.source, training_pass)
    return decoder(
        batch.tokens,
        batch.positions,
        batch.documents,
        document_ids=batch.document_ids,
        row_tokens=batch.row_tokens,
        placement=batch.placement,
        training_pass=training_pass,
        return_stats=return_stats,
        stream=stream,
        source=source,
        segments=batch.segments,
    )


def _at(x_Bt: Tensor, places: Tensor) -> Tensor:
    """These tokens' rows of [B, t, …], as one row of them."""
    return x_Bt.flatten(0, 1).index_select(0, places)[None]

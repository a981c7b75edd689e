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
from longctx.model.chunks.stream import ResidualStream, new_stream
from longctx.model.decoder import Decoder, described
from longctx.model.experts.balance import balance_sum
from longctx.model.experts.router import RouterDiagnostics
from longctx.model.mtp import HeadInput
from longctx.model.training_pass import TrainingPass
from longctx.objectives.task import Countable, LossSum, Task, Term


def prediction_terms(config: ModelConfig, mtp_weight: float = 0.0) -> tuple[Term, ...]:
    """Return the sums of predicted tokens, and those of routers if the model has any."""
    terms = [Term("objective", "targets", 1.0), Term("nll", "targets")]
    if config.num_experts:
        # Routers see every token, including the last one of a document, which has no target.
        terms.append(Term("balance", "tokens", config.balance_loss_weight))
        terms.append(Term("router_z", "tokens", config.router_z_loss_weight))
    if config.pair_head != "none":
        terms += Term("pair", "pairs", 1.0), Term("right_pairs", "pairs")
    if config.mtp_layers:
        terms += Term("mtp", "ahead", mtp_weight), Term("mtp_nll", "ahead")
    return tuple(terms)


Shift = Callable[[Tensor, Batch], Tensor]
"""From a value of each token to that of the token that follows in the sequence, on whatever rank it is."""


def shifted(values_Bt: Tensor, batch: Batch) -> Tensor:
    """Return the values of the following tokens, in one process; the last one is followed by the first."""
    return values_Bt.flatten().roll(-1).view_as(values_Bt)


def identity(counts_LSE: Tensor, batch: Batch) -> Tensor:
    """Return the counts unchanged: in one process no other rank shares the sequence."""
    return counts_LSE


class TokenPrediction(Task):
    """Negative log-likelihood per target, plus router losses per token. A subclass defines the targets."""

    reported = "nll"

    def __init__(
        self,
        decoder: Decoder,
        reduce_counts: Callable[[Tensor, Batch], Tensor] = identity,
        *,
        shift: Shift = shifted,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        mtp_weight: float = 0.0,
    ) -> None:
        """Set the loss options. ``mtp_weight`` weighs multi-token prediction, the other two are ``LossOptions``'.

        ``reduce_counts`` sums int64 counts over ranks that share the batch: [L, S, E], or [L, 1, E] if the micro-batch
        is balanced as one. It is called once per micro-batch of experts, on every rank even without tokens, but never
        if the global batch is balanced. ``shift`` is called once or twice per block for multi-token prediction.
        """
        super().__init__(decoder)
        # A run's config is refused earlier; this is for a model built by hand.
        if decoder.config.pair_head != "none" and decoder.execution.chunk_tokens:
            raise ConfigError("a pair head reads hidden states that layers by chunks never have whole: chunk_tokens=0.")
        self.terms = prediction_terms(decoder.config, mtp_weight)
        self.reduce_counts, self.shift = reduce_counts, shift
        self.z_loss, self.label_smoothing = z_loss, label_smoothing

    def denominators(self, batch: Countable) -> dict[str, int]:
        """Return the counts of targets, tokens (no padding), pairs (pair head) and targets further ahead (MTP)."""
        counts = {"targets": batch.num_targets, "tokens": batch.num_tokens}
        if self.network.pair_head is not None:
            counts["pairs"] = batch.num_pairs
        if self.network.config.mtp_layers:
            counts["ahead"] = batch.num_ahead(self.network.config.mtp_layers)
        return counts

    def forward(self, batch: Batch, training_pass: TrainingPass | None = None) -> tuple[Tensor, ...]:
        """Return ``LossSum.tensors`` of the terms.

        ``objective`` is the differentiated loss: negative log-likelihood, of smoothed labels, plus z-loss; ``nll`` is
        plain, without gradient. ``balance`` and ``router_z`` are summed over layers of experts and tokens. ``pair`` is
        the loss of the pair head, and ``right_pairs`` counts its correct answers. ``mtp`` and ``mtp_nll`` are the first
        two for the targets further ahead.
        """
        stream, ahead = new_stream(self.network.execution, batch.tokens), self._ahead(batch)
        found, stats = hidden_states(
            self.network,
            batch,
            training_pass,
            return_stats=True,
            stream=stream,
            ahead=[tokens_Bt for tokens_Bt, _ in ahead],
        )
        hidden_BtM, targets_Bt = found, batch.targets
        if ahead:
            hidden_BtM = found[0].hidden_BtM
        further: dict[str, Tensor] = {}
        if self.network.pair_head is not None:
            further = self._pair_sums(hidden_BtM, batch)
        if batch.places is not None and stream is None:
            hidden_BtM, targets_Bt = _at(hidden_BtM, batch.places), _at(targets_Bt, batch.places)
        sums = self._sums(hidden_BtM, targets_Bt, stream)
        if ahead:
            further |= self._sums_ahead(found[1:], [targets_Bt for _, targets_Bt in ahead])
        if not stats:
            # A dense model has no routers, on any rank.
            return LossSum(sums | further).tensors()
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
            sums | further, counts_LE, RouterDiagnostics.stack([layer.diagnostics for layer in stats])
        ).tensors()

    def _sums(
        self, hidden_BtM: Tensor, targets_Bt: Tensor, stream: ResidualStream | None, norm: nn.Module | None = None
    ) -> dict[str, Tensor]:
        """Return the first two sums of the terms; ``norm`` as in ``Decoder.loss_sums``."""
        # The head's product and the loss in one op, a block of tokens at a time: the full logits never exist.
        objective_sum, nll_sum = self.network.loss_sums(
            hidden_BtM,
            targets_Bt,
            z_loss=self.z_loss,
            label_smoothing=self.label_smoothing,
            stream=stream,
            norm=norm,
        )
        return {"objective": objective_sum, "nll": nll_sum}

    def _ahead(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Return the tokens that each block for multi-token prediction reads, and its targets. Collective.

        For token i they are those of token i + 1 of the same document. After the document's last token any value may be
        read, because nothing that counts depends on it.
        """
        found: list[tuple[Tensor, Tensor]] = []
        tokens_Bt, targets_Bt = batch.following, batch.targets
        begins_Bt = batch.positions == 0
        for number in range(self.network.config.mtp_layers):
            assert tokens_Bt is not None, "nobody has read what follows"
            # The first block reads the following tokens from the data; a document's first token follows none.
            if number:
                tokens_Bt = self.shift(tokens_Bt.masked_fill(begins_Bt, IGNORED_TARGET), batch)
            targets_Bt = self.shift(targets_Bt.masked_fill(begins_Bt, IGNORED_TARGET), batch)
            found.append((tokens_Bt.clamp(min=0), targets_Bt))
        return found

    def _sums_ahead(self, found: Sequence[HeadInput], targets: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return both sums over the targets of all blocks for multi-token prediction."""
        # The head's matrix gets a gradient from each.
        each = [self._sums(x.hidden_BtM, of_x, x.stream, x.norm) for x, of_x in zip(found, targets, strict=True)]
        return {
            "mtp": torch.stack([sums["objective"] for sums in each]).sum(),
            "mtp_nll": torch.stack([sums["nll"] for sums in each]).sum(),
        }

    def _pair_sums(self, hidden_BtM: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the pair head's cross-entropy over this rank's first tokens, and its number of correct answers."""
        order, firsts = batch.order, batch.firsts
        if order is None:
            order = torch.full_like(batch.tokens, IGNORED_TARGET)
        if firsts is None:
            firsts = (order.flatten() != IGNORED_TARGET).nonzero().flatten()
        # The head also runs on a rank without first tokens: ZeRO gathers its weights on all ranks.
        logits_F2 = self.network.pair_head(_at(hidden_BtM, firsts)[0])
        order_F = order.flatten()[firsts]
        right = (logits_F2.argmax(1) == order_F).sum().float()
        logits_F2 = logits_F2.to(accumulate_dtype(logits_F2.dtype))
        return {"pair": functional.cross_entropy(logits_F2, order_F, reduction="sum"), "right_pairs": right}

    @torch.no_grad()
    def token_nll(self, batch: Batch) -> Tensor:
        """Return each token's negative log-likelihood [B, t], float32, without gradient; 0 if the target is ignored."""
        hidden_BtM, places = hidden_states(self.network, batch), batch.places
        if places is None:
            return self.network.token_nll(hidden_BtM, batch.targets)
        nll_1c = self.network.token_nll(_at(hidden_BtM, places), _at(batch.targets, places))
        nll_N = nll_1c.new_zeros(batch.targets.numel()).index_copy_(0, places, nll_1c[0])
        return nll_N.view_as(batch.targets)


def hidden_states(
    decoder: Decoder,
    batch: Stream,
    training_pass: TrainingPass | None = None,
    *,
    return_stats: bool = False,
    stream: ResidualStream | None = None,
    ahead: Sequence[Tensor] = (),
) -> Any:
    """Return ``Decoder.forward`` of a batch with all of its per-token data, after encoding its source."""
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
        ahead=ahead,
        **described(batch),
    )


def _at(x_Bt: Tensor, places: Tensor) -> Tensor:
    """Return the rows of [B, t, …] at these places, as one row."""
    return x_Bt.flatten(0, 1).index_select(0, places)[None]

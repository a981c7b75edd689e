"""Next-token prediction with balanced experts: the one module that is trained.

Axes: B rows, t tokens of this rank, L layers of experts, S documents of the micro-batch, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longctx.batch import Batch
from longctx.model.chunks.start import new_stream
from longctx.model.chunks.stream import ResidualStream
from longctx.model.decoder import Decoder
from longctx.model.experts.balance import balance_sum
from longctx.model.experts.router import RouterDiagnostics
from longctx.model.training_pass import TrainingPass
from longctx.objectives.loss_sum import LossSum


def identity(counts_LSE: Tensor, batch: Batch) -> Tensor:
    """The counts as they are: in one process no other rank shares the sequence."""
    return counts_LSE


class CausalLM(nn.Module):
    """Decoder and objective in one forward, so that ZeRO-3 sees every use of a parameter."""

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
        super().__init__()
        self.decoder = decoder
        self.reduce_counts = reduce_counts
        self.z_loss, self.label_smoothing = z_loss, label_smoothing

    def forward(self, batch: Batch, training_pass: TrainingPass | None = None) -> tuple[Tensor, ...]:
        """``LossSum.tensors``: a plain tuple, which ZeRO-3's hooks can look into."""
        stream = new_stream(self.decoder.execution, batch.tokens)
        hidden_BtM, stats = self._run(batch, training_pass, return_stats=True, stream=stream)
        # The head's product and the loss in one op, a block of tokens at a time: logits are never whole.
        objective_sum, nll_sum = self.decoder.loss_sums(
            hidden_BtM,
            batch.targets,
            z_loss=self.z_loss,
            label_smoothing=self.label_smoothing,
            stream=stream,
        )
        if not stats:
            # A dense model: every rank still returns tensors of one structure.
            zero, counts_LE = torch.zeros_like(nll_sum), batch.tokens.new_zeros(0, 0)
            nothing = RouterDiagnostics.none(nll_sum, 0)
            return LossSum(objective_sum, zero, zero, counts_LE, nll_sum, nothing).tensors()
        scope = self.decoder.config.balance_scope
        load_LE = None
        if training_pass is not None:
            load_LE = training_pass.expert_load_LE

        def reduce_counts(counts_LSE: Tensor) -> Tensor:
            return self.reduce_counts(counts_LSE, batch)

        balance = balance_sum(stats, scope=scope, reduce_counts=reduce_counts, load_LE=load_LE)
        # Over layers: sums of sums, which add up over ranks and micro-batches like those of the tokens.
        z_sum = torch.stack([layer.z_sum for layer in stats]).sum()
        counts_LE = torch.stack([layer.counts_SE.sum(0) for layer in stats])
        diagnostics = RouterDiagnostics.stack([layer.diagnostics for layer in stats])
        return LossSum(objective_sum, balance, z_sum, counts_LE, nll_sum, diagnostics).tensors()

    @torch.no_grad()
    def token_nll(self, batch: Batch) -> Tensor:
        """Each token's negative log-likelihood [B, t], float32, without gradient; 0 where the target is ignored."""
        return self.decoder.token_nll(self._run(batch, None, return_stats=False), batch.targets)

    def _run(
        self,
        batch: Batch,
        training_pass: TrainingPass | None,
        *,
        return_stats: bool,
        stream: ResidualStream | None = None,
    ) -> Any:
        """The decoder's hidden states, and with ``return_stats`` the routers' statistics."""
        return self.decoder(
            batch.tokens,
            batch.positions,
            batch.documents,
            document_ids=batch.document_ids,
            row_tokens=batch.row_tokens,
            placement=batch.placement,
            training_pass=training_pass,
            return_stats=return_stats,
            stream=stream,
        )

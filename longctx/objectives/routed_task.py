"""RoutedTask: a task over a network that may have experts, which adds their routers' losses.

Axes: B rows, t tokens of this rank, L layers of experts, S documents of the micro-batch, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from longctx.batch import Batch, ReadTokens, Stream
from longctx.config import ModelConfig
from longctx.model.chunks.residual_stream import ResidualStream, new_stream
from longctx.model.decoder import Decoder, stream_arguments
from longctx.model.experts.balance import balance_sum
from longctx.model.experts.router import RouterDiagnostics, RouterStats
from longctx.model.training_pass import TrainingPass
from longctx.objectives.task import LossSum, Task, Term


def router_terms(config: ModelConfig) -> list[Term]:
    """Return the routers' terms; empty for a dense model."""
    if not config.num_experts:
        return []
    # routers see every token, including a document's last one, which has no target
    return [
        Term("balance", "tokens", config.balance_loss_weight),
        Term("router_z", "tokens", config.router_z_loss_weight),
    ]


def identity(counts_LSE: Tensor, batch: Batch) -> Tensor:
    """Return the counts unchanged: in one process no other rank shares the sequence."""
    return counts_LSE


class RoutedTask(Task):
    """Task that runs the network once per micro-batch; subclasses compute their sums from its result."""

    def __init__(self, network: Decoder, reduce_counts: Callable[[Tensor, Batch], Tensor] = identity) -> None:
        """Set up the task.

        ``reduce_counts`` sums int64 counts over ranks that share the batch: [L, S, E], or [L, 1, E] if the micro-batch
        is balanced as one. It is called once per micro-batch with experts, on every rank even without tokens, but never
        if the global batch is balanced.
        """
        super().__init__(network)
        self.reduce_counts = reduce_counts

    def forward(self, batch: Batch, training_pass: TrainingPass | None = None) -> tuple[Tensor, ...]:
        """Return ``LossSum.tensors`` for the terms."""
        stream, mtp_batches = None, self.mtp_batches(batch)
        # Stages have streams of their own.
        if not self.network.config.image.depths:
            stream = new_stream(self.network.execution, batch.tokens)
        found, stats = hidden_states(
            self.network,
            batch,
            training_pass,
            return_stats=True,
            stream=stream,
            mtp_tokens=[tokens_Bt for tokens_Bt, _ in mtp_batches],
            read=self.read_tokens(batch) if stream is None else None,
        )
        # Heads come after the network, inside this module's forward: ZeRO-3 gathers their weights only here.
        sums = self.sums_of(found, batch, stream, mtp_batches)
        if not stats:
            # a dense model has no routers, on any rank
            return LossSum(self._in_order(sums)).tensors()
        sums |= self._router_sums(stats, batch, training_pass)
        counts_LE = torch.stack([layer.counts_SE.sum(0) for layer in stats])
        diagnostics = RouterDiagnostics.stack([layer.diagnostics for layer in stats])
        return LossSum(self._in_order(sums), counts_LE, diagnostics).tensors()

    def sums_of(
        self,
        found: Any,
        batch: Batch,
        stream: ResidualStream | None,
        mtp_batches: Sequence[tuple[Tensor, Tensor]],
    ) -> dict[str, Tensor]:
        """Return the sums for all terms but the routers', from the network's result ``found``.

        ``found`` holds hidden states [B, t, M] or the handle of ``stream``; with ``mtp_batches`` one ``HeadInput`` per
        head.
        """
        raise NotImplementedError

    def read_tokens(self, batch: Batch) -> ReadTokens | None:
        """Return the tokens whose hidden states ``sums_of`` reads; None: all."""
        return None

    def mtp_batches(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Return the input tokens and targets for each multi-token prediction block; empty without any."""
        return []

    def _router_sums(
        self, stats: Sequence[RouterStats], batch: Batch, training_pass: TrainingPass | None
    ) -> dict[str, Tensor]:
        """Return the routers' losses, summed over layers: like token sums, they add up over ranks and micro-batches."""
        load_LE = None
        if training_pass is not None:
            load_LE = training_pass.expert_load_LE

        def reduce_counts(counts_LSE: Tensor) -> Tensor:
            return self.reduce_counts(counts_LSE, batch)

        scope = self.network.config.balance_scope
        balance = balance_sum(stats, scope=scope, reduce_counts=reduce_counts, load_LE=load_LE)
        return {"balance": balance, "router_z": torch.stack([layer.z_sum for layer in stats]).sum()}

    def _in_order(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        return {term.name: sums[term.name] for term in self.terms}


def hidden_states(
    decoder: Decoder,
    batch: Stream,
    training_pass: TrainingPass | None = None,
    *,
    return_stats: bool = False,
    stream: ResidualStream | None = None,
    mtp_tokens: Sequence[Tensor] = (),
    read: ReadTokens | None = None,
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
        read=read,
        **stream_arguments(batch),
    )

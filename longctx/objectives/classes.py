"""Classes of documents, the training objective for image classifiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from longctx.batch import Batch, ReadTokens, Stream, with_targets
from longctx.errors import ConfigError
from longctx.kernels.dtypes import accumulate_dtype
from longctx.model.chunks.residual_stream import ResidualStream
from longctx.model.decoder import Decoder
from longctx.objectives.document_labels import LabelledDocuments, ReduceSums, label_logits, label_sums
from longctx.objectives.routed_task import RoutedTask, hidden_states, identity, router_terms
from longctx.objectives.task import Countable, Term, TokenScores


class Classes(RoutedTask):
    """Negative log-likelihood of each document's class; a document counts once, however long it is."""

    reported = "nll"

    def __init__(
        self,
        network: Decoder,
        reduce_counts: Callable[[Tensor, Batch], Tensor] = identity,
        reduce_sums: ReduceSums = identity,
        *,
        label_smoothing: float = 0.0,
    ) -> None:
        """Set up the objective; ``reduce_sums`` serves document means, and every rank calls it in every pass."""
        super().__init__(network, reduce_counts)
        self.reduce_sums = reduce_sums if network.config.class_pool == "mean" else None
        self.label_smoothing = label_smoothing
        terms = [Term("objective", "labels", 1.0), Term("nll", "labels"), Term("right_classes", "labels")]
        self.terms = (*terms, *router_terms(network.config))

    def denominators(self, batch: Countable) -> dict[str, int]:
        """Count labelled documents and tokens (without padding)."""
        return {"labels": batch.num_labels, "tokens": batch.num_tokens}

    def prepare(self, stream: Stream) -> Batch:
        if stream.labels is None:
            raise ConfigError("train.objective=classes needs labelled images; this data has no labels.")
        return with_targets(stream, stream.labels)

    def sums_of(
        self,
        found: Any,
        batch: Batch,
        stream: ResidualStream | None,
        mtp_batches: Sequence[tuple[Tensor, Tensor]],
    ) -> dict[str, Tensor]:
        # Only the rank with a document's first token counts its loss; the others add 0.
        documents = LabelledDocuments.of(batch)
        logits_FC = self._logits(found, batch, documents, stream)
        sums = label_sums(logits_FC, documents, label_smoothing=self.label_smoothing)
        return {"objective": sums.objective, "nll": sums.nll, "right_classes": sums.right}

    def read_tokens(self, batch: Batch) -> ReadTokens | None:
        """Return the labelled documents' first tokens, unless the head reads means."""
        if self.reduce_sums is not None:
            return None
        return ReadTokens.of_firsts(LabelledDocuments.of(batch).indices_F, batch.documents)

    def token_nll(self, batch: Batch) -> Tensor:
        """Return each document's negative log-likelihood at its first token [B, t], without gradient; 0 elsewhere."""
        return self.score(batch).nll_Bt

    @torch.no_grad()
    def score(self, batch: Batch) -> TokenScores:
        documents = LabelledDocuments.of(batch)
        hidden_BtM = hidden_states(self.network, batch, read=self.read_tokens(batch))
        logits_FC = self._logits(hidden_BtM, batch, documents)
        # Scores stand at the first tokens, so that validation counts documents as it counts tokens.
        nll_F = torch.nn.functional.cross_entropy(logits_FC, documents.labels_F, reduction="none")
        right_F = logits_FC.argmax(1) == documents.labels_F
        nll_Bt, right_Bt = (
            x_F.new_zeros(batch.targets.numel()).index_copy_(0, documents.indices_F, x_F).view_as(batch.targets)
            for x_F in (nll_F, right_F)
        )
        return TokenScores(nll_Bt, right_Bt)

    def _logits(
        self, hidden_BtM: Tensor, batch: Batch, documents: LabelledDocuments, stream: ResidualStream | None = None
    ) -> Tensor:
        network = self.network
        if self.reduce_sums is None and stream is None:
            logits_FC = network.class_head(hidden_BtM[0])
            return logits_FC.to(accumulate_dtype(logits_FC.dtype))
        return label_logits(network, network.class_head, hidden_BtM, batch, documents, self.reduce_sums, stream=stream)

"""Losses of heads that classify documents: a pair head, or a class head.

Axes: B rows, t tokens of this rank, S documents, F labelled documents with their first token on this rank, M model
width, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from longctx.architecture.image_stages import stage_configs
from longctx.batch import IGNORED_TARGET, Batch, Stream
from longctx.config import ModelConfig
from longctx.kernels.dtypes import accumulate_dtype
from longctx.model.chunks.residual_stream import ResidualStream
from longctx.model.decoder import Decoder
from longctx.model.document_head import DocumentHead, Pool, document_pool
from longctx.model.image_stages import ImageHidden
from longctx.model.token_pool import TokenPool

ReduceSums = Callable[[Tensor, Batch], Tensor]
"""Sums [S, M] over the ranks that share the batch, with gradient."""


@dataclass(frozen=True, eq=False)
class LabelledDocuments:
    """Labelled documents with their first token on this rank. All other ranks compute none of their losses."""

    indices_F: Tensor
    """Their first tokens as indices into [B·t], int64."""
    labels_F: Tensor

    @classmethod
    def of(cls, stream: Stream) -> LabelledDocuments:
        """Return a stream's labelled documents; without known indices they are searched, which a GPU waits for."""
        labels, indices_F = stream.labels, stream.label_indices
        if labels is None:
            labels = torch.full_like(stream.tokens, IGNORED_TARGET)
        if indices_F is None:
            indices_F = (labels.flatten() != IGNORED_TARGET).nonzero().flatten()
        return cls(indices_F, labels.flatten()[indices_F])


def label_logits(
    network: Decoder,
    head: DocumentHead,
    hidden: Tensor | ImageHidden,
    batch: Batch,
    documents: LabelledDocuments,
    reduce_sums: ReduceSums | None,
    *,
    stream: ResidualStream | None = None,
) -> Tensor:
    """Compute logits [F, C] at least in float32, from first tokens, or with ``reduce_sums`` from document means.

    Every rank runs the head, also without documents: ZeRO-3 gathers its weights on all ranks.
    """
    of_documents: Pool | None = None
    if reduce_sums is None:
        pool = _first_tokens(batch, documents)
    else:
        if isinstance(hidden, ImageHidden):
            pool, stream, hidden = _image_means(network.config, batch, hidden), None, hidden.hidden_BtM
            # Any rank may have an image's last patches, wherever the batch's layout put its first ones.
            batch = replace(batch, placement=None)
        else:
            pool = _document_means(batch)
        document_F = batch.document_ids.flatten()[documents.indices_F]

        def complete_sums(sums_SM: Tensor) -> Tensor:
            return reduce_sums(sums_SM, batch)[document_F]

        of_documents = complete_sums

    # The pool runs inside the head: by chunks it needs the last norm, which the head's hooks gather.
    logits_FC = head(hidden, document_pool(pool, of_documents, stream=stream, norm=network.model.norm))
    return logits_FC.to(accumulate_dtype(logits_FC.dtype))


class LabelSums(NamedTuple):
    """Sums over labelled documents, float32."""

    objective: Tensor
    """Label-smoothed negative log-likelihood."""
    nll: Tensor
    """Negative log-likelihood, without gradient."""
    right: Tensor
    """Number of correct predictions."""


def label_sums(logits_FC: Tensor, documents: LabelledDocuments, *, label_smoothing: float = 0.0) -> LabelSums:
    """Return a head's sums over this rank's labelled documents."""
    labels_F = documents.labels_F
    loss = functional.cross_entropy(logits_FC, labels_F, reduction="sum", label_smoothing=label_smoothing)
    nll = loss.detach()
    if label_smoothing:
        nll = functional.cross_entropy(logits_FC.detach(), labels_F, reduction="sum")
    return LabelSums(loss, nll, (logits_FC.argmax(1) == labels_F).sum().float())


def _first_tokens(batch: Batch, documents: LabelledDocuments) -> TokenPool:
    """Return the pool of the labelled documents' first tokens."""
    num_sums = len(documents.indices_F)
    numbers_Bt = torch.full_like(batch.tokens, num_sums)
    numbers_Bt.view(-1)[documents.indices_F] = torch.arange(num_sums, device=numbers_Bt.device)
    return TokenPool(numbers_Bt, num_sums)


def _image_means(config: ModelConfig, batch: Batch, found: ImageHidden) -> TokenPool:
    """Return the pool of documents' means over a hierarchical model's tokens."""
    num_sums, tokens_per_image = batch.documents.num_documents, config.image.num_tokens
    # The tokens are a last stage's, so they belong to images by number, not by the batch's token indices. Padding may
    # span several images; an image is never cut.
    starts = torch.arange(0, batch.documents.num_tokens, tokens_per_image)
    numbers = torch.searchsorted(batch.documents.cu_seqlens, starts, right=True) - 1
    for number in batch.documents.padding or ():
        numbers[numbers == number] = num_sums
    tokens = stage_configs(config)[-1].image.num_tokens
    factors_S = torch.full((num_sums,), 1 / tokens, dtype=torch.float64)
    device = found.images_t.device
    numbers_Bt = numbers.to(device, non_blocking=True)[found.images_t][None]
    return TokenPool(numbers_Bt, num_sums, factors_S.to(device, non_blocking=True))


def _document_means(batch: Batch) -> TokenPool:
    """Return the pool of all documents' means: a rank's sums are only parts, so a rank sums them without labels too."""
    num_sums = batch.documents.num_documents
    numbers_Bt = batch.document_ids.where(batch.document_ids >= 0, num_sums)
    lengths_S = torch.tensor(batch.documents.lengths, dtype=torch.float64).clamp_(min=1)
    return TokenPool(numbers_Bt, num_sums, lengths_S.reciprocal_().to(numbers_Bt.device, non_blocking=True))

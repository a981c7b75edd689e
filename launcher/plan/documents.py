"""A micro-batch of the shape that a run will meet, when its data need not exist yet."""

from __future__ import annotations

import torch

from launcher.config.resolved import ResolvedConfig
from longctx.batch import IGNORED_TARGET, PackedDocuments, Stream


def documents_of(config: ResolvedConfig, document_tokens: int = 0) -> PackedDocuments:
    """``train.micro_batch_rows`` full rows of documents of this length; 0 is a row each."""
    rows, tokens = config.train.micro_batch_rows, config.data.seq_len
    length = min(document_tokens or tokens, tokens)
    # A row's last document is shorter where the length does not divide it; no document crosses rows.
    bounds = [row * tokens + start for row in range(rows) for start in range(0, tokens, length)]
    return PackedDocuments((*bounds, rows * tokens))


def synthetic_batch(config: ResolvedConfig, document_tokens: int = 0) -> Stream:
    """``train.micro_batch_rows`` full rows of documents of this length (0: a row each). Token ids are 0."""
    documents, shape = documents_of(config, document_tokens), (config.train.micro_batch_rows, config.data.seq_len)
    lengths = torch.tensor(documents.lengths)
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)
    positions = torch.arange(documents.num_tokens) - torch.tensor(documents.bounds[:-1]).repeat_interleave(lengths)
    zeros = torch.zeros(shape, dtype=torch.int64)
    masked = None
    if config.mask is not None:
        # As evenly as they can lie.
        steps = (torch.arange(documents.num_tokens + 1) * config.mask.rate).floor().diff()
        masked = zeros.masked_fill((steps == 0).view(shape), IGNORED_TARGET)
    return Stream(
        tokens=zeros,
        masked=masked,
        following=zeros,
        positions=positions.view(shape),
        document_ids=ids.view(shape),
        documents=documents,
    )

"""A micro-batch of the shape that a run will meet, when its data need not exist yet."""

from __future__ import annotations

import torch

from launcher.config.sections import RunConfig
from longctx.batch import Batch, PackedDocuments


def synthetic_batch(config: RunConfig, document_tokens: int = 0) -> Batch:
    """``train.micro_batch_rows`` full rows of documents of this length (0: a row each). Token ids are 0."""
    rows, tokens = config.train.micro_batch_rows, config.data.seq_len
    documents = documents_of(config, document_tokens)
    lengths = torch.tensor(documents.lengths)
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)
    positions = torch.arange(rows * tokens) - torch.tensor(documents.bounds[:-1]).repeat_interleave(lengths)
    shape = (rows, tokens)
    zeros = torch.zeros(shape, dtype=torch.int64)
    return Batch(
        tokens=zeros,
        targets=zeros,
        positions=positions.view(shape),
        document_ids=ids.view(shape),
        documents=documents,
    )


def documents_of(config: RunConfig, document_tokens: int = 0) -> PackedDocuments:
    """The documents of such a micro-batch."""
    rows, tokens = config.train.micro_batch_rows, config.data.seq_len
    length = min(document_tokens or tokens, tokens)
    # A row's last document is shorter where the length does not divide it; no document crosses rows.
    bounds = [row * tokens + start for row in range(rows) for start in range(0, tokens, length)]
    return PackedDocuments((*bounds, rows * tokens))

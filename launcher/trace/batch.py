"""A micro-batch of the shape that a run will meet, when its data need not exist yet."""

from __future__ import annotations

import torch

from launcher.config.resolved import ResolvedConfig
from launcher.plan.documents import documents_of
from longctx.batch import Stream


def synthetic_batch(config: ResolvedConfig, document_tokens: int = 0) -> Stream:
    """``train.micro_batch_rows`` full rows of documents of this length (0: a row each). Token ids are 0."""
    rows, tokens = config.train.micro_batch_rows, config.data.seq_len
    documents = documents_of(config, document_tokens)
    lengths = torch.tensor(documents.lengths)
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)
    positions = torch.arange(rows * tokens) - torch.tensor(documents.bounds[:-1]).repeat_interleave(lengths)
    shape = (rows, tokens)
    zeros = torch.zeros(shape, dtype=torch.int64)
    return Stream(
        tokens=zeros,
        following=zeros,
        positions=positions.view(shape),
        document_ids=ids.view(shape),
        documents=documents,
    )

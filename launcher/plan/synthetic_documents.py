"""Synthetic micro-batches in a run's shape, for planning before its data exist."""

from __future__ import annotations

from dataclasses import replace

import torch

from launcher.config.resolved import ResolvedConfig
from longctx.batch import IGNORED_TARGET, PackedDocuments, Stream


def uniform_documents(config: ResolvedConfig, document_tokens: int = 0) -> PackedDocuments:
    """Return documents with this length (0: one per row) that fill ``train.micro_batch_rows`` rows."""
    rows, tokens = config.train.micro_batch_rows, config.data.seq_len
    length = min(document_tokens or tokens, tokens)
    # If the length does not divide the row, its last document is shorter; no document crosses rows.
    bounds = [row * tokens + start for row in range(rows) for start in range(0, tokens, length)]
    return PackedDocuments((*bounds, rows * tokens))


def synthetic_batch(config: ResolvedConfig, document_tokens: int = 0) -> Stream:
    """Build ``train.micro_batch_rows`` full rows with documents of this length (0: one per row). Token ids are 0.

    A model with an encoder also gets full source rows, divided evenly among a row's documents.
    """
    documents, rows = uniform_documents(config, document_tokens), config.train.micro_batch_rows
    stream = _stream(documents, rows)
    if config.mask is not None:
        # Spread masked tokens as evenly as possible.
        steps = (torch.arange(documents.num_tokens + 1) * config.mask.rate).floor().diff()
        not_masked = (steps == 0).view_as(stream.tokens)
        stream = replace(stream, masked=torch.zeros_like(stream.tokens).masked_fill(not_masked, IGNORED_TARGET))
    if not config.model.encoder_layers:
        return stream
    count, tokens = documents.num_documents // rows, config.data.source_seq_len
    bounds = [row * tokens + number * tokens // count for row in range(rows) for number in range(count)]
    source = _stream(PackedDocuments((*bounds, rows * tokens)), rows)
    return replace(stream, source=replace(source, next_token_ids=None))


def _stream(documents: PackedDocuments, rows: int) -> Stream:
    lengths, shape = torch.tensor(documents.lengths), (rows, documents.num_tokens // rows)
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)
    positions = torch.arange(documents.num_tokens) - torch.tensor(documents.bounds[:-1]).repeat_interleave(lengths)
    zeros = torch.zeros(shape, dtype=torch.int64)
    return Stream(
        tokens=zeros,
        next_token_ids=zeros,
        positions=positions.view(shape),
        document_ids=ids.view(shape),
        documents=documents,
    )

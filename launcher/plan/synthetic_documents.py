"""Synthetic micro-batches in a run's shape, for planning before its data exist."""

from __future__ import annotations

from dataclasses import replace

import torch

from launcher.config.config_sections import RunConfig
from launcher.config.resolved import ResolvedConfig
from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, PackedDocuments, Stream
from longctx.errors import ConfigError


def uniform_documents(config: ResolvedConfig, document_tokens: int = 0) -> PackedDocuments:
    """Return documents with this length (0: one per row) that fill ``train.micro_batch_rows`` rows.

    For a model of images they are images, and padding behind a row's last image.
    """
    rows, tokens = config.train.micro_batch_rows, config.data.seq_len
    length = min(document_length(config, document_tokens), tokens)
    # If the length does not divide the row, its last document is shorter; no document crosses rows.
    bounds = [row * tokens + start for row in range(rows) for start in range(0, tokens, length)]
    padding: tuple[int, ...] = ()
    if config.model.image.is_used and tokens % length:
        of_row = -(-tokens // length)
        padding = tuple(range(of_row - 1, rows * of_row, of_row))
    return PackedDocuments((*bounds, rows * tokens), padding)


def document_length(config: RunConfig, document_tokens: int = 0) -> int:
    """Return the documents' length in tokens: the given one, an image's, or by default a row's.

    Raise ConfigError for a given length of images.
    """
    if not config.model.image.is_used:
        return document_tokens or config.data.seq_len
    image_tokens = config.model.image.num_tokens
    if document_tokens:
        raise ConfigError(
            f"--document-tokens {document_tokens} is for texts: an image (model.image) has {image_tokens} tokens. "
            "Leave it out."
        )
    return image_tokens


def synthetic_batch(config: ResolvedConfig, document_tokens: int = 0) -> Stream:
    """Build ``train.micro_batch_rows`` full rows with documents of this length (0: one per row). Token ids are 0.

    A model of images gets images of zeros, each of class 0. A model with an encoder also gets full source rows, divided
    evenly among a row's documents.
    """
    documents, rows = uniform_documents(config, document_tokens), config.train.micro_batch_rows
    stream = _stream(documents, rows)
    if config.model.image.is_used:
        stream = _images(config, stream)
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


def _images(config: ResolvedConfig, stream: Stream) -> Stream:
    """Return the stream with pixels and labels, as far as the model reads them."""
    padding = torch.tensor(stream.documents.padding or (), dtype=torch.int64)
    is_padding = torch.isin(stream.document_ids, padding)
    ids = stream.document_ids.masked_fill(is_padding, PADDING_DOCUMENT)
    next_ids = torch.zeros_like(ids).masked_fill(is_padding, IGNORED_TARGET)
    pixels = labels = None
    if config.model.image.patch:
        pixels = torch.zeros((*ids.shape, config.model.image.pixel_bytes), dtype=torch.uint8)
    if config.model.classes:
        labels = torch.zeros_like(ids).masked_fill(is_padding | (stream.positions > 0), IGNORED_TARGET)
    return replace(stream, document_ids=ids, next_token_ids=next_ids, pixels=pixels, labels=labels)


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

"""Rows with random documents, the same in every process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from launcher.config.resolved import ResolvedConfig
from launcher.verification.random_images import image_rows
from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, PackedDocuments, Stream

_PADDING = 3
"""Padding tokens at the end of each row."""


def micro_batch(config: ResolvedConfig, step: int, rows_of_step: range) -> Stream:
    """Build a micro-batch from these rows in a step, numbered over all data ranks: packed rows that end in padding.

    In every second step, half the tokens count in the loss, as in conversations. A masked objective masks some tokens
    in every step, and a pair head needs documents with two segments. With an encoder, each document reads a source of
    any length. A model of images gets images, which all count.
    """
    rows, tokens = len(rows_of_step), config.data.seq_len
    # Seeded by step and first row, so that every process builds the same rows.
    generator = torch.Generator().manual_seed((step << 20) + rows_of_step.start)
    if config.model.image.is_used:
        stream = image_rows(config, rows_of_step.start, rows, generator)
        return stream if config.mask is None else _with_masks(stream, config, generator)
    ids: list[int] = []
    num_documents = []
    for row in range(rows):
        lengths = _document_lengths(tokens - min(_PADDING, tokens - 1), generator)
        for number, length in enumerate(lengths):
            ids += [row * tokens + number] * length
        ids += [PADDING_DOCUMENT] * (tokens - sum(lengths))
        num_documents.append(len(lengths))
    # Any of them may become a target.
    tokens_BT = torch.randint(config.model.head_rows, (rows * tokens,), generator=generator).view(rows, tokens)
    stream = packed_rows(tokens_BT, torch.tensor(ids).view(rows, tokens))
    if config.model.pair_head != "none":
        stream = _with_segments(stream, generator)
    if config.mask is not None:
        return _with_masks(stream, config, generator)
    if config.data.source_seq_len:
        stream = replace(stream, source=_sources(config, num_documents, generator))
    if step % 2:
        return replace(stream, loss_mask=torch.rand(rows, tokens, generator=generator) < 0.5)
    return stream


def _with_masks(stream: Stream, config: ResolvedConfig, generator: torch.Generator) -> Stream:
    """Return the stream with some tokens masked."""
    assert config.mask is not None
    # Tokens are random, so any other token can replace a masked one.
    shape = stream.tokens.shape
    is_target = (torch.rand(shape, generator=generator) < config.mask.rate) & (stream.document_ids >= 0)
    read_as = torch.randint(config.model.vocab_size, shape, generator=generator)
    return replace(
        stream,
        tokens=torch.where(is_target, read_as, stream.tokens),
        masked=stream.tokens.masked_fill(~is_target, IGNORED_TARGET),
    )


def _with_segments(stream: Stream, generator: torch.Generator) -> Stream:
    """Return the stream with two segments in each document, in random order."""
    lengths_D = torch.tensor(stream.documents.lengths)
    is_text_BT = stream.document_ids != PADDING_DOCUMENT
    second_BT = 2 * stream.positions >= lengths_D[stream.document_ids.clamp(min=0)]
    labels_BT = torch.randint(2, stream.tokens.shape, generator=generator)
    is_first_BT = is_text_BT & (stream.positions == 0)
    return replace(
        stream,
        segments=(second_BT & is_text_BT).long(),
        labels=labels_BT.masked_fill(~is_first_BT, IGNORED_TARGET),
    )


def _sources(config: ResolvedConfig, num_documents: Sequence[int], generator: torch.Generator) -> Stream:
    """Build rows with as many sources as each row has documents, padded at the end; some sources are empty."""
    tokens, ids, number = config.data.source_seq_len, [], 0
    for count in num_documents:
        # The first source has enough tokens for one to be changed, and tokens after the last cut are padding.
        most = max(1, tokens - _PADDING)
        boundaries = torch.randint(most + 1, (count,), generator=generator).clamp(min=min(2, most)).sort().values
        of_row = boundaries.diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()
        for length in of_row:
            ids += [number] * length
            number += 1
        ids += [PADDING_DOCUMENT] * (tokens - sum(of_row))
        number += 1
    shape = (len(num_documents), tokens)
    source_tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
    return source_rows(source_tokens, torch.tensor(ids).view(shape), num_documents)


def source_rows(tokens_BS: Tensor, ids_BS: Tensor, num_documents: Sequence[int]) -> Stream:
    """Build rows from source numbers, ascending in each row; some sources may be empty, and padding is at the end.

    Each row has ``num_documents`` numbers, and one more for its padding.
    """
    lengths, padding, positions = [], [], []
    for of_row, count in zip(ids_BS, num_documents, strict=True):
        first = len(lengths)
        lengths += [int((of_row == first + number).sum()) for number in range(count)]
        padding.append(len(lengths))
        lengths.append(int((of_row < 0).sum()))
        positions += [torch.arange(length) for length in lengths[first:]]
    return Stream(
        tokens=tokens_BS,
        positions=torch.cat(positions).view_as(tokens_BS),
        document_ids=ids_BS,
        documents=PackedDocuments.of_lengths(lengths, tuple(padding)),
    )


def packed_rows(tokens_BT: Tensor, ids_BT: Tensor) -> Stream:
    """Pack these tokens into rows: adjacent equal ids form a document, ``PADDING_DOCUMENT`` is padding."""
    tokens_N, ids_N = tokens_BT.flatten(), ids_BT.flatten()
    # Rows are concatenated, so a document also starts at every row boundary.
    is_start_N = ids_N != ids_N.roll(1)
    is_start_N[:: tokens_BT.shape[1]] = True
    numbers_N = is_start_N.cumsum(0) - 1
    starts = is_start_N.nonzero().flatten()
    is_padding_N = ids_N == PADDING_DOCUMENT
    # A document's last token has no target.
    target_N = tokens_N.roll(-1).masked_fill(is_start_N.roll(-1) | is_padding_N, IGNORED_TARGET)
    return Stream(
        tokens=tokens_BT,
        next_token_ids=target_N.view_as(tokens_BT),
        positions=(torch.arange(len(ids_N)) - starts[numbers_N]).view_as(tokens_BT),
        document_ids=numbers_N.masked_fill(is_padding_N, PADDING_DOCUMENT).view_as(tokens_BT),
        documents=PackedDocuments((*starts.tolist(), len(ids_N))),
    )


def _document_lengths(tokens: int, generator: torch.Generator) -> list[int]:
    """Return lengths that add up to ``tokens``: a long document first, then shorter and shorter ones."""
    lengths = []
    while tokens:
        # A quarter to three quarters of the rest, so that some documents in a row span many ranks and others only one.
        share = 0.25 + 0.5 * float(torch.rand((), generator=generator))
        length = max(1, min(tokens, round(tokens * share)))
        lengths.append(length)
        tokens -= length
    return lengths

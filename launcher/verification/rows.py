"""Rows of random documents: the same for every process that asks for them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from launcher.config.resolved import ResolvedConfig
from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, PackedDocuments, Stream

_PADDING = 3
"""Tokens at the end of each row that are padding."""


def micro_batch(config: ResolvedConfig, step: int, rows_of_step: range) -> Stream:
    """A micro-batch of these rows of a step, counted over all data ranks: packed rows that end in padding.

    In every second step half of the tokens count in the loss, as of conversations; if the objective is masked, some are
    masked in every step.
    """
    rows, tokens = len(rows_of_step), config.data.seq_len
    generator = torch.Generator().manual_seed((step << 20) + rows_of_step.start)
    ids: list[int] = []
    for row in range(rows):
        lengths = _document_lengths(tokens - min(_PADDING, tokens - 1), generator)
        for number, length in enumerate(lengths):
            ids += [row * tokens + number] * length
        ids += [PADDING_DOCUMENT] * (tokens - sum(lengths))
    tokens_BT = torch.randint(config.model.vocab_size, (rows * tokens,), generator=generator).view(rows, tokens)
    stream = packed_rows(tokens_BT, torch.tensor(ids).view(rows, tokens))
    if config.mask is not None:
        # The tokens themselves are random, so any other one stands for what is read in its place.
        is_target = (torch.rand(rows, tokens, generator=generator) < config.mask.rate) & (stream.document_ids >= 0)
        read_as = torch.randint(config.model.vocab_size, (rows, tokens), generator=generator)
        return replace(
            stream,
            tokens=torch.where(is_target, read_as, stream.tokens),
            masked=stream.tokens.masked_fill(~is_target, IGNORED_TARGET),
        )
    if step % 2:
        return replace(stream, counted=torch.rand(rows, tokens, generator=generator) < 0.5)
    return stream


def packed_rows(tokens_BT: Tensor, ids_BT: Tensor) -> Stream:
    """Rows of these tokens: neighbours of one id in a row are a document, ``PADDING_DOCUMENT`` is padding."""
    tokens_N, ids_N = tokens_BT.flatten(), ids_BT.flatten()
    begins_N = ids_N != ids_N.roll(1)
    begins_N[:: tokens_BT.shape[1]] = True
    numbers_N = begins_N.cumsum(0) - 1
    starts = begins_N.nonzero().flatten()
    is_padding_N = ids_N == PADDING_DOCUMENT
    following_N = tokens_N.roll(-1).masked_fill(begins_N.roll(-1) | is_padding_N, IGNORED_TARGET)
    return Stream(
        tokens=tokens_BT,
        following=following_N.view_as(tokens_BT),
        positions=(torch.arange(len(ids_N)) - starts[numbers_N]).view_as(tokens_BT),
        document_ids=numbers_N.masked_fill(is_padding_N, PADDING_DOCUMENT).view_as(tokens_BT),
        documents=PackedDocuments((*starts.tolist(), len(ids_N))),
    )


def _document_lengths(tokens: int, generator: torch.Generator) -> list[int]:
    """Lengths that add up to so many tokens: a long document first, then shorter and shorter ones."""
    lengths = []
    while tokens:
        # Up to half of what is left, so that a row has documents that many ranks share and some that none do.
        share = 0.25 + 0.5 * float(torch.rand((), generator=generator))
        length = max(1, min(tokens, round(tokens * share)))
        lengths.append(length)
        tokens -= length
    return lengths

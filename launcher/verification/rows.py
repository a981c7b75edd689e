"""Rows of random documents: the same for every process that asks for them."""

from __future__ import annotations

import torch

from launcher.config.resolved import ResolvedConfig
from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, PackedDocuments, Stream

_PADDING = 3
"""Tokens at the end of each row that are padding."""


def micro_batch(config: ResolvedConfig, step: int, rows_of_step: range) -> Stream:
    """A micro-batch of these rows of a step, counted over all data ranks: packed rows that end in padding."""
    rows, tokens = len(rows_of_step), config.data.seq_len
    generator = torch.Generator().manual_seed((step << 20) + rows_of_step.start)
    lengths: list[int] = []
    is_padding: list[bool] = []
    for _ in range(rows):
        of_row = _document_lengths(tokens - min(_PADDING, tokens - 1), generator)
        lengths += of_row
        is_padding += [False] * len(of_row)
        if sum(of_row) < tokens:
            lengths.append(tokens - sum(of_row))
            is_padding.append(True)
    ends = torch.tensor(lengths).cumsum(0)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    positions = torch.arange(rows * tokens) - (ends - torch.tensor(lengths))[ids]
    tokens_N = torch.randint(config.model.vocab_size, (rows * tokens,), generator=generator)
    following = tokens_N.roll(-1)
    following[ends - 1] = IGNORED_TARGET
    padding_N = torch.tensor(is_padding)[ids]
    shape = (rows, tokens)
    return Stream(
        tokens=tokens_N.view(shape),
        following=following.masked_fill(padding_N, IGNORED_TARGET).view(shape),
        positions=positions.view(shape),
        document_ids=ids.masked_fill(padding_N, PADDING_DOCUMENT).view(shape),
        documents=PackedDocuments((0, *ends.tolist())),
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

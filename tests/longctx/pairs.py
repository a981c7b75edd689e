"""Batches of pairs: documents of two sequences, number by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, Batch, PackedDocuments, Stream, next_tokens

PAIRS = ((5, 9), (1, 4), (0, 3), (7, 0), (6, 13))
"""Tokens of the target and of the source of each pair: one of either side is empty."""


def pair_tokens(pairs: Sequence[tuple[int, int]], *, vocab: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Random tokens of both sides of each pair."""
    g = torch.Generator().manual_seed(seed)
    return [(torch.randint(vocab, (a,), generator=g), torch.randint(vocab, (b,), generator=g)) for a, b in pairs]


def one_row(documents: Sequence[Tensor], padding: int = 0) -> Stream:
    """The documents end to end in one row, and so many tokens of padding behind them."""
    lengths = [len(tokens) for tokens in documents]
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    following = [torch.cat([tokens[1:], torch.full((min(1, len(tokens)),), IGNORED_TARGET)]) for tokens in documents]
    packed, behind = [torch.cat(list(documents)), torch.cat(following), ids], [0, IGNORED_TARGET, PADDING_DOCUMENT]
    positions = torch.cat([torch.arange(n) for n in (*lengths, padding)])
    tokens, follow, own = (torch.cat([x, torch.full((padding,), fill)]) for x, fill in zip(packed, behind, strict=True))
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    if padding:
        bounds.append(bounds[-1] + padding)
    return Stream(
        tokens=tokens[None],
        positions=positions[None],
        document_ids=own[None],
        next_token_ids=follow[None],
        documents=PackedDocuments.of(bounds),
    )


def pair_batch(
    pairs: Sequence[tuple[int, int]] = PAIRS, *, vocab: int, padding: tuple[int, int] = (0, 0), seed: int = 0
) -> Batch:
    """The pairs as one row of targets, which has its source beside it; padding of (target, source)."""
    tokens = pair_tokens(pairs, vocab=vocab, seed=seed)
    targets, sources = (one_row([pair[side] for pair in tokens], padding[side]) for side in range(2))
    return next_tokens(replace(targets, source=replace(sources, next_token_ids=None)))

"""``parallel.tokens_per_rank``: how many rows a context group processes at once, and how many tokens each rank then
holds.

The rows are placed side by side in one layout over the full group, ring × Ulysses.
"""

from __future__ import annotations

from parallel.layout.balanced import whole_grains


def rows_at_once(seq_len: int, ranks: int, tokens_per_rank: int) -> int:
    """Return how many micro-batch rows fit on ``ranks`` ranks; 0 if one row is too long."""
    return ranks * tokens_per_rank // seq_len


def tokens_on_ranks(num_tokens: int, ranks: int, *, ulysses: int, tokens_per_rank: int) -> int:
    """Return the micro-batch's token count, padded so that every rank holds equally many.

    If ``tokens_per_rank`` leaves room, a ring rank's tokens are also padded to full grains: otherwise each ring rank
    would start with a short run, which cuts documents. The padding is less than a grain (128 tokens) per ring rank.
    """
    each = -(-num_tokens // ranks)
    whole = each
    # A ring rank's tokens include all its Ulysses ranks' tokens, since these split heads.
    while not whole_grains(whole * ulysses):
        whole += 1
    if whole <= tokens_per_rank:
        each = whole
    return each * ranks

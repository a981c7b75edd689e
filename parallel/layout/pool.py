"""``parallel.tokens_per_rank``: how many rows a pool of ranks takes at once, and the tokens that it then holds.

A *pool* is the ranks that share a micro-batch, ring × Ulysses. Its rows lie side by side in one layout.
"""

from __future__ import annotations

from parallel.layout.balanced import whole_grains


def rows_at_once(seq_len: int, pool: int, tokens_per_rank: int) -> int:
    """Rows of a micro-batch that a pool of ranks has room for; 0 where one row is too long."""
    return pool * tokens_per_rank // seq_len


def pool_tokens(num_tokens: int, pool: int, *, ulysses: int, tokens_per_rank: int) -> int:
    """The tokens of a micro-batch, padded so that every rank of the pool holds equally many.

    And, where ``tokens_per_rank`` leaves room, so that a ring rank's are whole grains: else each of them would begin
    with a short piece, which cuts documents. That is less than a grain (128 tokens) a ring rank.
    """
    each = -(-num_tokens // pool)
    whole = each
    # A ring rank's tokens are those of the ranks that split its heads.
    while not whole_grains(whole * ulysses):
        whole += 1
    if whole <= tokens_per_rank:
        each = whole
    return each * pool

"""KVBlock: keys and values for one attention call; the Transport protocol that delivers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from longctx.kernels.attention.kernel_interface import merge_
from longctx.model.attention.attention_work import Work
from parallel.schedule.ring_work import Hop

KeysAndValues = tuple[Tensor, ...]
"""Pair: [B, s, K, D] and [B, s, K, V], or their gradients."""

PartialResult = tuple[Tensor, Tensor]
"""Output [B, t, H, V] and log-sum-exp [B, t, H] over a subset of the keys."""


class KVBlock(NamedTuple):
    """Keys and values that a rank received, and its work with them."""

    keys_BsKD: Tensor
    values_BsKV: Tensor
    queries: slice
    """Query rows with work."""
    work: tuple[Work, ...]
    """Query rows count from the start of ``queries``."""

    @classmethod
    def of_hop(cls, hop: Hop, keys_and_values: KeysAndValues) -> KVBlock:
        """Build a hop's block from its received rows."""
        keys, values = keys_and_values
        first, stop = hop.queries
        return cls(keys, values, slice(first, stop), hop.work)


class Transport(Protocol):
    """Delivery of a ring's keys and values to one rank, block by block, and return of their gradients to the owners."""

    def forward(self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[KVBlock], PartialResult]) -> PartialResult:
        """Return attention over all blocks for local queries: ``compute`` per block, merged in order, local block
        first.
        """
        ...

    def backward(self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[KVBlock], KeysAndValues]) -> KeysAndValues:
        """Return dK and dV for local rows, summed in a fixed order; ``compute`` returns each block's contribution."""
        ...


# Log-sum-exp merge. Softmax over disjoint key blocks decomposes exactly: with lse_b the block's log-sum-exp and out_b
# its softmax output, lse = log Σ_b exp(lse_b) and out = Σ_b exp(lse_b − lse) · out_b. The invariant after each merge:
# out and lse equal attention over all blocks so far. (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv
# 2205.14135.)
def merge_block_(out_BtHV: Tensor, lse_BtH: Tensor, block: KVBlock, part: PartialResult) -> None:
    """Merge a block's partial result into the running one, in place."""
    # Only query rows with work: merging the others would cost a pass over memory and change no value.
    part_out, part_lse = part
    merge_(out_BtHV[:, block.queries], lse_BtH[:, block.queries], part_out, part_lse)

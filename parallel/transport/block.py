"""KVBlock: keys and values that a rank attends to; the Transport protocol that brings them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from longctx.kernels.attention.contract import merge_
from longctx.model.attention.work import Work
from parallel.schedule.work import Hop

KeysAndValues = tuple[Tensor, ...]
"""Two: [B, s, K, D] and [B, s, K, V], or their gradients."""

PartialResult = tuple[Tensor, Tensor]
"""Output [B, t, H, V] and log-sum-exp [B, t, H] over some of the keys."""


class KVBlock(NamedTuple):
    """Keys and values that a rank attends to, and its work with them."""

    keys_BsKD: Tensor
    values_BsKV: Tensor
    queries: slice
    """Query rows with work."""
    work: tuple[Work, ...]
    """Query rows count from the start of ``queries``."""

    @classmethod
    def of_hop(cls, hop: Hop, keys_and_values: KeysAndValues) -> KVBlock:
        """Return the block of a hop whose rows have arrived."""
        keys, values = keys_and_values
        first, stop = hop.queries
        return cls(keys, values, slice(first, stop), hop.work)


class Transport(Protocol):
    """Transport of a ring's keys and values to one rank, block by block, and of their gradients to the owners."""

    def forward(self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[KVBlock], PartialResult]) -> PartialResult:
        """Return attention of this rank's queries over all blocks: ``compute`` of each, merged in order, own first."""
        ...

    def backward(self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[KVBlock], KeysAndValues]) -> KeysAndValues:
        """Return dK and dV of this rank's own rows, summed in a fixed order; ``compute`` gives those of each block."""
        ...


def merge_block_(out_BtHV: Tensor, lse_BtH: Tensor, block: KVBlock, part: PartialResult) -> None:
    """Merge the result of a block into that of the blocks before it, in place."""
    # Only the query rows with work: the others have nothing to merge, and copying them would cost a pass over memory.
    part_out, part_lse = part
    merge_(out_BtHV[:, block.queries], lse_BtH[:, block.queries], part_out, part_lse)

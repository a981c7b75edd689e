"""Ulysses: ranks in one ring rank exchange rows for heads; each then holds all their rows for some heads.

DeepSpeed-Ulysses, arXiv 2309.14509, generalized to any number of heads: query heads that do not divide are distributed
as evenly as possible, and a key head goes to every rank with a query head in its group.

Axes: B batch, t rows per rank, T rows per ring rank, s key rows, H heads on all ranks, h heads on this one, K key heads
on this one, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype
from parallel.comm.messages.kinds import Kind
from parallel.comm.process_groups import ProcessGroup
from parallel.mesh import Mesh
from parallel.schedule.head_split import HeadRange, HeadSplit


@dataclass(frozen=True)
class HeadExchange:
    """Exchange of rows for heads and back; the identity if heads are not split."""

    mesh: Mesh
    split: HeadSplit
    num_heads: int
    num_kv_heads: int

    @classmethod
    def build(cls, mesh: Mesh, num_heads: int, num_kv_heads: int) -> HeadExchange:
        """Build the exchange over the mesh. Raise ConfigError if its Ulysses ranks cannot split the heads."""
        return cls(mesh, HeadSplit.build(num_heads, num_kv_heads, mesh.ulysses), num_heads, num_kv_heads)

    @property
    def query_heads(self) -> slice:
        """This rank's query heads."""
        start, stop = self.split.queries[self.mesh.ulysses_rank]
        return slice(start, stop)

    @property
    def key_heads(self) -> slice:
        """Key heads that this rank's query heads use."""
        start, stop = self.split.keys[self.mesh.ulysses_rank]
        return slice(start, stop)

    @property
    def num_kernel_key_heads(self) -> int:
        """Number of key heads passed to the kernel, see ``expand``."""
        heads = self.query_heads
        if self._key_of_query is None:
            heads = self.key_heads
        return heads.stop - heads.start

    def to_heads(self, x: Tensor, *, keys: bool = False) -> Tensor:
        """Convert [B, t, heads, …] to [B, T, local heads, …] by all-to-all."""
        group = self.mesh.ulysses_group
        if group is None:
            return x
        ranges = self.split.queries
        if keys:
            ranges = self.split.keys
        return rows_to_heads(x, ranges, self.mesh, group)

    def to_rows(self, x: Tensor, *, keys: bool = False) -> Tensor:
        """Apply the inverse of ``to_heads``; sum heads that several ranks hold."""
        group = self.mesh.ulysses_group
        if group is None:
            return x
        if keys:
            return heads_to_rows(x, self.split.keys, self.num_kv_heads, self.mesh, group)
        return heads_to_rows(x, self.split.queries, self.num_heads, self.mesh, group)

    def expand(self, x_BsKD: Tensor) -> Tensor:
        """Return key heads in the kernel's grouping: one per query head if the local groups are uneven."""
        key_of_query = self._key_of_query
        if key_of_query is None:
            return x_BsKD
        return x_BsKD.index_select(2, _index(tuple(key_of_query), x_BsKD.device))

    def fold(self, grad_BshD: Tensor) -> Tensor:
        """Sum gradients of expanded key heads into the heads that they were copied from."""
        key_of_query = self._key_of_query
        if key_of_query is None:
            return grad_BshD
        B, s, _, D = grad_BshD.shape
        dtype = accumulate_dtype(grad_BshD.dtype)
        folded = grad_BshD.new_zeros(B, s, self.key_heads.stop - self.key_heads.start, D, dtype=dtype)
        # A loop instead of index_add_, which on a GPU adds in nondeterministic order.
        for query, key in enumerate(key_of_query):
            folded[:, :, key] += grad_BshD[:, :, query]
        return folded

    @property
    def _key_of_query(self) -> list[int] | None:
        return self.split.key_of_query(self.mesh.ulysses_rank)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # training may reuse tensors that evaluation cached
def _index(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the indices on a device, copied once: creating them there would synchronize in each layer and hop."""
    return torch.tensor(numbers).to(device, non_blocking=True)


def rows_to_heads(x_BtHD: Tensor, ranges: Sequence[HeadRange], mesh: Mesh, group: ProcessGroup) -> Tensor:
    """Gather all the ring rank's rows for this rank's heads: [B, t, H, D] on each rank becomes [B, T, h, D]."""
    B, t, _, D = x_BtHD.shape
    start, stop = ranges[mesh.ulysses_rank]
    u, h = len(ranges), stop - start
    # Send buffers are flat because ranks may hold different numbers of heads. Ulysses ranks are in row order.
    send_parts = [x_BtHD[:, :, first:last].reshape(-1) for first, last in ranges]
    received = _all_to_all(send_parts, [B * t * h * D] * u, mesh, group)
    return received.view(u, B, t, h, D).transpose(0, 1).reshape(B, u * t, h, D)


def heads_to_rows(
    x_BThD: Tensor, ranges: Sequence[HeadRange], num_heads: int, mesh: Mesh, group: ProcessGroup
) -> Tensor:
    """Apply the inverse: return local rows for all heads, [B, t, H, D]; sum heads on several ranks in rank order."""
    B, T, _, D = x_BThD.shape
    t = T // len(ranges)
    send_parts = [part.reshape(-1) for part in x_BThD.split(t, dim=1)]
    sizes = [B * t * (stop - start) * D for start, stop in ranges]
    received = _all_to_all(send_parts, sizes, mesh, group)
    # A key head on several ranks has one gradient per rank; add them in rank order.
    out = x_BThD.new_zeros(B, t, num_heads, D)
    for (start, stop), part in zip(ranges, received.split(sizes), strict=True):
        out[:, :, start:stop] += part.view(B, t, stop - start, D)
    return out


def _all_to_all(send_parts: Sequence[Tensor], sizes: Sequence[int], mesh: Mesh, group: ProcessGroup) -> Tensor:
    """Send each rank its buffer; return the received buffers concatenated, ``sizes`` values from each rank."""
    send_sizes = [part.numel() for part in send_parts]
    return mesh.comm.all_to_all(
        torch.cat(list(send_parts)), group, operation="exchanging heads", counts=(send_sizes, sizes), kind=Kind.HEADS
    )

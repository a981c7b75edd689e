"""Ulysses: the ranks of a ring rank trade rows for heads, so that each holds all its rows for a part of the heads.

DeepSpeed-Ulysses, arXiv 2309.14509; here with any number of heads. Query heads that do not divide are spread as evenly
as possible, and a key head goes to every rank that has a query head of its group.

Axes: B batch, t rows of a rank, T rows of its ring rank, s key rows, H heads of all ranks, h heads of this one, K key
heads of this one, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype
from parallel.comm.groups import ProcessGroup
from parallel.comm.messages.kinds import Kind
from parallel.mesh import Mesh
from parallel.schedule.heads import HeadRange, HeadSplit


@dataclass(frozen=True)
class HeadExchange:
    """Exchange of rows for heads and back; everything stays as it is if heads are not split."""

    mesh: Mesh
    split: HeadSplit
    num_heads: int
    num_kv_heads: int

    @classmethod
    def build(cls, mesh: Mesh, num_heads: int, num_kv_heads: int) -> HeadExchange:
        """Build the exchange of these heads over the mesh. Raise ConfigError if so many ranks cannot split them."""
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
        """Number of key heads that the kernel is given, see ``expand``."""
        heads = self.query_heads
        if self._key_of_query is None:
            heads = self.key_heads
        return heads.stop - heads.start

    def to_heads(self, x: Tensor, *, keys: bool = False) -> Tensor:
        """Exchange [B, t, heads, …] for [B, T, this rank's heads, …]."""
        group = self.mesh.ulysses_group
        if group is None:
            return x
        ranges = self.split.queries
        if keys:
            ranges = self.split.keys
        return rows_to_heads(x, ranges, self.mesh, group)

    def to_rows(self, x: Tensor, *, keys: bool = False) -> Tensor:
        """Apply the inverse of ``to_heads``; heads that several ranks hold are summed."""
        group = self.mesh.ulysses_group
        if group is None:
            return x
        if keys:
            return heads_to_rows(x, self.split.keys, self.num_kv_heads, self.mesh, group)
        return heads_to_rows(x, self.split.queries, self.num_heads, self.mesh, group)

    def expand(self, x_BsKD: Tensor) -> Tensor:
        """Return key heads as the kernel needs them: one for each query head if the rank's groups are uneven."""
        key_of_query = self._key_of_query
        if key_of_query is None:
            return x_BsKD
        return x_BsKD.index_select(2, _index(tuple(key_of_query), x_BsKD.device))

    def fold(self, grad_BshD: Tensor) -> Tensor:
        """Return gradients of expanded key heads, summed into the heads they came from."""
        key_of_query = self._key_of_query
        if key_of_query is None:
            return grad_BshD
        B, s, _, D = grad_BshD.shape
        dtype = accumulate_dtype(grad_BshD.dtype)
        folded = grad_BshD.new_zeros(B, s, self.key_heads.stop - self.key_heads.start, D, dtype=dtype)
        # Head after head: index_add_ on a GPU adds those of one key head in whatever order its threads have.
        for query, key in enumerate(key_of_query):
            folded[:, :, key] += grad_BshD[:, :, query]
        return folded

    @property
    def _key_of_query(self) -> list[int] | None:
        return self.split.key_of_query(self.mesh.ulysses_rank)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # training may find tensors that evaluation cached
def _index(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the numbers on a device, copied there once: making them there would wait, in each layer and hop."""
    return torch.tensor(numbers).to(device, non_blocking=True)


def rows_to_heads(x_BtHD: Tensor, ranges: Sequence[HeadRange], mesh: Mesh, group: ProcessGroup) -> Tensor:
    """Return all rows of the ring rank for this rank's range of heads: [B, t, H, D] on each becomes [B, T, h, D]."""
    B, t, _, D = x_BtHD.shape
    start, stop = ranges[mesh.ulysses_rank]
    u, h = len(ranges), stop - start
    # Flat parts of unequal size, since ranks may hold unequal numbers of heads; ranks are in the order of the rows.
    outgoing = [x_BtHD[:, :, first:last].reshape(-1) for first, last in ranges]
    received = _all_to_all(outgoing, [B * t * h * D] * u, mesh, group)
    return received.view(u, B, t, h, D).transpose(0, 1).reshape(B, u * t, h, D)


def heads_to_rows(
    x_BThD: Tensor, ranges: Sequence[HeadRange], num_heads: int, mesh: Mesh, group: ProcessGroup
) -> Tensor:
    """Return this rank's rows for all heads, [B, t, H, D]: the inverse. Heads on several ranks are summed by rank."""
    B, T, _, D = x_BThD.shape
    t = T // len(ranges)
    outgoing = [part.reshape(-1) for part in x_BThD.split(t, dim=1)]
    sizes = [B * t * (stop - start) * D for start, stop in ranges]
    received = _all_to_all(outgoing, sizes, mesh, group)
    # A key head that several ranks hold gets several gradients; they are added rank by rank.
    out = x_BThD.new_zeros(B, t, num_heads, D)
    for (start, stop), part in zip(ranges, received.split(sizes), strict=True):
        out[:, :, start:stop] += part.view(B, t, stop - start, D)
    return out


def _all_to_all(outgoing: Sequence[Tensor], sizes: Sequence[int], mesh: Mesh, group: ProcessGroup) -> Tensor:
    """Send each rank its part; return theirs end to end, ``sizes`` values of each."""
    outgoing_sizes = [part.numel() for part in outgoing]
    return mesh.comm.all_to_all(
        torch.cat(list(outgoing)), group, doing="exchanging heads", counts=(outgoing_sizes, sizes), kind=Kind.HEADS
    )

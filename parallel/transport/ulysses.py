"""Ulysses: the ranks of a ring index trade rows for heads, so that each holds all its rows for a share of the heads.

DeepSpeed-Ulysses, arXiv 2309.14509; here with any number of heads. Query heads that do not divide are dealt as evenly
as they can be, and a key head goes to every rank that has a query head of its group.

Axes: B batch, t rows of a rank, T rows of its ring index, H heads of all ranks, h heads of this one, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from longctx.errors import ConfigError

if TYPE_CHECKING:
    from parallel.schedule import AttentionShape

HeadRange = tuple[int, int]
"""Heads [start, stop)."""


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each of ``ulysses`` ranks computes."""

    queries: tuple[HeadRange, ...]
    """Query heads of each rank: disjoint, all of them."""
    keys: tuple[HeadRange, ...]
    """Key/value heads that each rank's query heads use; the same one may serve several ranks."""
    group_size: int
    """Query heads that share a key head."""

    @classmethod
    def build(cls, num_heads: int, num_kv_heads: int, ulysses: int) -> HeadSplit:
        """The split; ConfigError when there are fewer query heads than ranks, or key heads do not divide them."""
        check_heads(num_heads, num_kv_heads, ulysses)
        group = num_heads // num_kv_heads
        queries = [(num_heads * r // ulysses, num_heads * (r + 1) // ulysses) for r in range(ulysses)]
        keys = [(start // group, (stop - 1) // group + 1) for start, stop in queries]
        return cls(tuple(queries), tuple(keys), group)

    def key_of_query(self, rank: int) -> list[int] | None:
        """For each query head of the rank its key head, counted in the rank's own; None when they group evenly."""
        (start, stop), (first, last) = self.queries[rank], self.keys[rank]
        wanted = [head // self.group_size - first for head in range(start, stop)]
        even, rest = divmod(stop - start, last - first)
        return None if not rest and wanted == [h // even for h in range(stop - start)] else wanted

    def bytes_received(self, rank: int, num_local: int, bytes_per_value: int, shape: AttentionShape) -> int:
        """Bytes that trading brings a rank in a forward pass: its heads of the others' rows, its rows' other heads."""
        (start, stop), (first, last) = self.queries[rank], self.keys[rank]
        value_dim = shape.key_and_value_dim - shape.head_dim
        row = (stop - start) * shape.head_dim + (last - first) * shape.key_and_value_dim
        others = num_local * (len(self.queries) - 1) * row
        back = num_local * (shape.num_heads - (stop - start)) * value_dim
        return (others + back) * bytes_per_value


def check_heads(num_heads: int, num_kv_heads: int, ulysses: int) -> None:
    """ConfigError unless so many ranks can share the heads."""
    if num_heads % num_kv_heads:
        raise ConfigError(f"{num_kv_heads} key heads do not divide {num_heads} query heads.")
    if ulysses > num_heads:
        raise ConfigError(
            f"parallel.ulysses={ulysses} is more than the {num_heads} query heads that it spreads.\n"
            f"Try parallel.ulysses={num_heads} or less; parallel.context may stay, the rest becomes the ring."
        )


def rows_to_heads(x_BtHD: Tensor, ranges: Sequence[HeadRange], rank: int, group: ProcessGroup) -> Tensor:
    """All rows of the ring index for this rank's range of heads: [B, t, H, D] on each rank becomes [B, T, h, D]."""
    B, t, _, D = x_BtHD.shape
    parts = [x_BtHD[:, :, start:stop].reshape(-1) for start, stop in ranges]
    h = ranges[rank][1] - ranges[rank][0]
    u = len(ranges)
    got = x_BtHD.new_empty(u * B * t * h * D)
    _all_to_all(got, parts, [got.numel() // u] * u, group)
    return got.view(u, B, t, h, D).transpose(0, 1).reshape(B, u * t, h, D)


def heads_to_rows(x_BThD: Tensor, ranges: Sequence[HeadRange], num_heads: int, group: ProcessGroup) -> Tensor:
    """The inverse: this rank's rows for all heads, [B, t, H, D]; heads that several ranks hold are summed by rank."""
    B, T, _, D = x_BThD.shape
    t = T // len(ranges)
    parts = [part.reshape(-1) for part in x_BThD.split(t, dim=1)]
    sizes = [B * t * (stop - start) * D for start, stop in ranges]
    got = x_BThD.new_empty(sum(sizes))
    _all_to_all(got, parts, sizes, group)
    out = x_BThD.new_zeros(B, t, num_heads, D)
    for (start, stop), part in zip(ranges, got.split(sizes), strict=True):
        out[:, :, start:stop] += part.view(B, t, stop - start, D)
    return out


def _all_to_all(got: Tensor, parts: Sequence[Tensor], sizes: Sequence[int], group: ProcessGroup) -> None:
    dist.all_to_all_single(got, torch.cat(list(parts)), list(sizes), [p.numel() for p in parts], group=group)

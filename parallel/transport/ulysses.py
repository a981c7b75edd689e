"""Ulysses: the ranks of a ring index trade rows for heads, so that each holds all its rows for a share of the heads.

DeepSpeed-Ulysses, arXiv 2309.14509; here with any number of heads. Query heads that do not divide are dealt as evenly
as they can be, and a key head goes to every rank that has a query head of its group.

Axes: B batch, t rows of a rank, T rows of its ring index, H heads of all ranks, h heads of this one, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel.schedule.heads import HeadRange

if TYPE_CHECKING:
    pass


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

"""Lower bound on a ring's time: the same kernel on one rank's KV blocks, without sending or merging.

A ring's time beyond it is the ring's overhead. Its own excess over a proportional part of one process's attention is
the kernel's: partial results are float32, which weighs the more, the faster a processor multiplies bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.kernels.attention.kernel_interface import KernelRequest, ScoreRules, merge_
from longctx.kernels.attention.kernel_selection import choose_kernel
from parallel.schedule.attention_schedule import Schedule


class _Block(NamedTuple):
    queries: slice
    slices: Tensor
    k: Tensor
    v: Tensor


def blocks_alone(schedule: Schedule, rank: int, whole: list[Tensor]) -> Callable[[], None]:
    """Compute forward and backward over a rank's KV blocks in arrival order. ``whole`` is q, k, v and the output's
    gradient.
    """
    q, dout = (schedule.layout.split(whole[n], rank, 1) for n in (0, 3))
    head_dim, num_kv_heads = whole[1].shape[3], whole[1].shape[2]
    kernel = choose_kernel("auto", KernelRequest("cpu", q.dtype, head_dim, q.shape[2], num_kv_heads))
    scores = ScoreRules(scale=head_dim**-0.5)
    blocks = list(_blocks(schedule, rank, whole[1], whole[2]))

    def forward(block: _Block) -> tuple[Tensor, Tensor]:
        return kernel.forward(q[:, block.queries], block.k, block.v, block.slices, scores=scores)

    out = torch.zeros(q.shape)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=torch.float64)
    for block in blocks:  # backward needs the result over all KV blocks
        merge_(out[:, block.queries], lse[:, block.queries], *forward(block))
    out = out.to(q.dtype)

    def run() -> None:
        for block in blocks:
            forward(block)
        for block in blocks:
            mine = (dout[:, block.queries], q[:, block.queries], block.k, block.v)
            result = (out[:, block.queries], lse[:, block.queries])
            kernel.backward(*mine, *result, block.slices, scores=scores)

    return run


def _blocks(schedule: Schedule, rank: int, k: Tensor, v: Tensor) -> Iterator[_Block]:
    for hop in schedule.hops(rank):
        index = hop.rows.index(k.device)
        keys, values = (schedule.layout.split(x, hop.owner, 1).index_select(1, index) for x in (k, v))
        for work in hop.work:  # one entry, or an empty list if no query sees a key
            yield _Block(slice(*hop.queries), work.slices, keys, values)

"""Chunks of a sequence dealt to ring indices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GRAIN = 128


def deal(num_tokens: int, degree: int, cu_seqlens: Sequence[int]) -> list[list[tuple[int, int]]]:
    """For each ring index its pieces (start, count), ascending."""
    share = num_tokens // degree
    if degree == 1:
        return [[(0, share)]]
    grain = GRAIN if share >= GRAIN else 1 << max(0, (share // 8).bit_length() - 1)
    whole, rest = divmod(share, grain)
    starts = np.arange(whole * degree) * grain
    if rest:
        starts = np.concatenate([starts, whole * degree * grain + np.arange(degree) * rest])
    ends = np.append(starts[1:], num_tokens)
    cu = np.asarray(cu_seqlens)
    depth = starts - cu[np.searchsorted(cu, starts, side="right") - 1]
    owner = np.empty(len(starts), dtype=np.int64)
    ranked = np.argsort(-depth[: whole * degree], kind="stable")
    snake = np.concatenate([np.arange(degree), np.arange(degree)[::-1]])
    owner[ranked] = np.resize(snake, len(ranked))
    owner[whole * degree :] = np.arange(len(starts) - whole * degree)
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(degree)]
    for start, end, rank in zip(starts.tolist(), ends.tolist(), owner.tolist(), strict=True):
        mine = pieces[rank]
        if mine and sum(mine[-1]) == start:
            mine[-1] = (mine[-1][0], end - mine[-1][0])
        else:
            mine.append((start, end - start))
    return pieces

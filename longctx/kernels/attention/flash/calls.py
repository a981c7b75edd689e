"""A table of slices as few calls of a variable-length flash kernel. Pure; knows shapes and windows, no kernel.

A varlen call takes packed query rows and packed key rows, both cut into the same number of sequences, and one window
for all: query row i of a sequence of sq rows sees key j of its sk keys where ``-right <= i + sk - sq - j <= left``,
that is, counted from the *last* row (bottom-right). −1 leaves a side open; a bound cannot be negative. Two sequences
of a call share neither query nor key rows, so forward needs no merge and backward no addition within it.

How slices come to that form:

* A slice is trimmed until its first and last row see a key and its first and last key are seen. Then both bounds count
  from the bottom-right corner and are ≥ 0, and no row without a key ever reaches a kernel.
* Slices with the same window whose rows are disjoint are one call, however many there are: all documents of a batch.
* Rectangles that share keys (in the ``balanced`` layout every chunk of a document sees a longer prefix of another
  rank's rows) are cut along a binary tree over the key axis. At each level of the tree a rectangle has at most one node
  on its left and one on its right border, so n steps of a staircase take log₂ n calls, not n.
* Bands that share keys or have too many different windows are cut into rectangles and square triangles.
* What still overlaps goes to as many calls as overlap.

Where scores depend on distances, each sequence keeps its own step and offset, and nothing is joined or cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from longctx.kernels.attention.slices import OPEN as OPEN_BOUND
from longctx.kernels.attention.slices import once_per_table

OPEN = -1
"""A window's side without a bound."""

_FAR = 1 << 40
"""Stands for an open bound in arithmetic; beyond any row index."""
_MAX_WINDOWS = 4
"""Different windows that bands may bring before they are cut into fewer kinds."""
_Q0, _Q1, _K0, _K1, _LO, _HI, _STEP, _OFFSET, _FACTOR, _SHIFT = range(10)
"""Columns of the table of work; the last two only where ALiBi is asked for."""

Rows = slice | Tensor
"""Rows of a tensor: a slice where they are neighbours, else their int64 indices."""


@dataclass(frozen=True, eq=False, slots=True)
class VarlenCall:
    """One call: which rows it packs, where its sequences end, its window. Tensors are on the CPU, for one batch row."""

    queries: Rows
    keys: Rows
    num_queries: int
    num_keys: int
    cu_seqlens_q: Tensor
    """Int32 bounds of the sequences in the packed query rows, [sequences + 1]."""
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    left: int
    right: int
    fresh: bool
    """Whether no earlier call of the plan has touched any of the query rows."""
    steps: Tensor
    """Distances of a sequence are ``step·(i − j) + offset`` with i and j counted from its first rows; int64."""
    offsets: Tensor
    slope_factors: Tensor | None = None
    """For ALiBi as flash-attn has it: what multiplies the slopes, by sequence. See ``_signed``."""
    shifts: Tensor | None = None
    """For ALiBi: (the slope times) what the kernel's log-sum-exps are too large by, by sequence."""


@once_per_table
def translate(slices: Tensor, *, distances: bool = False, alibi: bool = False) -> tuple[VarlenCall, ...]:
    """The calls that together compute every slice exactly once, those with most query rows first.

    ``distances`` keeps slices of different distances apart; ``alibi`` does so too, and cuts them such that a kernel
    whose bias is −slope·|i + sk − sq − j| gives the right one.
    """
    work = _trimmed(_columns(slices))
    if not len(work):
        return ()
    if alibi or distances:
        groups = _groups_by_window(_signed(work) if alibi else work, join=not alibi)
    else:
        rectangles, bands = _by_kind(work)
        groups, more = _band_groups(bands)
        groups, rectangles = _absorbed(groups, np.concatenate((rectangles, more)))
        groups += _rectangle_groups(rectangles)
    return _calls(groups)


# --- trimming and windows -----------------------------------------------------------------------------------------


def _columns(slices: Tensor) -> ndarray:
    """A copy of the table with ±_FAR for open bounds, which arithmetic does not overflow."""
    work = slices.numpy().copy()
    work[work[:, _LO] == OPEN_BOUND, _LO] = -_FAR
    work[work[:, _HI] == OPEN_BOUND, _HI] = _FAR
    return work


def _trimmed(work: ndarray) -> ndarray:
    """The same work without rows that see nothing, keys that nobody sees, and bounds that hold anyway."""
    work = work.copy()
    q0, q1, k0, k1, lo, hi = work.T[:6]
    first, last = np.maximum(q0, k0 + lo), np.minimum(q1, k1 + hi)
    near, far = np.minimum(k1, q1 - lo), np.maximum(k0, q0 - hi)
    work[:, _Q0], work[:, _Q1], work[:, _K0], work[:, _K1] = first, last, far, near
    work = work[(first < last) & (far < near) & (lo <= hi)]
    q0, q1, k0, k1, lo, hi = work.T[:6]
    work[:, _LO] = np.where(lo <= q0 - (k1 - 1), -_FAR, lo)
    work[:, _HI] = np.where(hi >= q1 - 1 - k0, _FAR, hi)
    return work


def _by_kind(work: ndarray) -> tuple[ndarray, ndarray]:
    """(full rectangles, bands) of trimmed work."""
    full = (work[:, _LO] == -_FAR) & (work[:, _HI] == _FAR)
    return work[full], work[~full]


def _windows(work: ndarray) -> ndarray:
    """(left, right) of each row of trimmed work, [n, 2]."""
    lo, hi = work[:, _LO], work[:, _HI]
    corner = work[:, _Q1] - work[:, _K1]  # i − j at the bottom-right corner, where the kernel counts 0
    left = np.where(hi == _FAR, OPEN, hi - corner)
    right = np.where(lo == -_FAR, OPEN, corner - lo)
    return np.stack((left, right), 1)


def _disjoint(starts: ndarray, stops: ndarray) -> bool:
    order = np.argsort(starts, kind="stable")
    return bool((stops[order][:-1] <= starts[order][1:]).all())


def _independent(work: ndarray) -> bool:
    return _disjoint(work[:, _Q0], work[:, _Q1]) and _disjoint(work[:, _K0], work[:, _K1])


# --- groups: what goes into one call -------------------------------------------------------------------------------


class _Group(NamedTuple):
    """Work for one call: rows in the order they are packed; rows with the same key range are one sequence."""

    left: int
    right: int
    work: ndarray


def _groups_by_window(work: ndarray, *, join: bool = True) -> list[_Group]:
    """The work by window, and within a window by what can stand in one call."""
    return [g for left, right, part in _buckets(work, join=join) for g in _first_fit(left, right, part)]


def _buckets(work: ndarray, *, join: bool = True) -> list[tuple[int, int, ndarray]]:
    """(left, right, work) for every window that occurs, sorted by first query row."""
    if not len(work):
        return []
    work = work[np.argsort(work[:, _Q0], kind="stable")]
    windows = _joined(_windows(work), work) if join else _windows(work)
    kinds, index = np.unique(windows, axis=0, return_inverse=True)
    index = index.reshape(-1)
    return [(int(left), int(right), work[index == n]) for n, (left, right) in enumerate(kinds)]


def _joined(windows: ndarray, work: ndarray) -> ndarray:
    """Windows in which an open side takes a neighbour's bound that does not bind it: short documents join long ones."""
    windows = windows.copy()
    for side, length in ((0, work[:, _K1] - work[:, _K0]), (1, work[:, _Q1] - work[:, _Q0])):
        other = windows[:, 1 - side]
        bounded = windows[:, side] != OPEN
        for kind in np.unique(other[bounded]) if bounded.any() else ():
            bound = windows[bounded & (other == kind), side].max()
            windows[~bounded & (other == kind) & (length - 1 <= bound), side] = bound
    return windows


def _absorbed(groups: list[_Group], rectangles: ndarray) -> tuple[list[_Group], ndarray]:
    """The groups with those rectangles that their window does not bind, and the rest: documents of one token."""
    found = []
    for group in groups:
        fits = np.ones(len(rectangles), dtype=bool)
        for bound, start, stop in ((group.left, _K0, _K1), (group.right, _Q0, _Q1)):
            fits &= (bound == OPEN) | (rectangles[:, stop] - rectangles[:, start] - 1 <= bound)
        both = np.concatenate((group.work, rectangles[fits]))
        if fits.any() and _independent(both):
            group = group._replace(work=both[np.argsort(both[:, _Q0], kind="stable")])
            rectangles = rectangles[~fits]
        found.append(group)
    return found, rectangles


def _first_fit(left: int, right: int, work: ndarray) -> list[_Group]:
    """One group where all rows are disjoint, else each piece in the first group that it does not overlap."""
    if _independent(work):
        return [_Group(left, right, work)]
    groups: list[list[tuple[int, int, int, int, int]]] = []
    for q0, q1, k0, k1, *_, n in np.column_stack((work[:, :4], np.arange(len(work)))).tolist():
        free = (g for g in groups if g[-1][1] <= q0 and all(k1 <= r[2] or r[3] <= k0 for r in g))
        group = next(free, None)
        if group is None:
            group = []
            groups.append(group)
        group.append((q0, q1, k0, k1, n))
    return [_Group(left, right, work[[piece[4] for piece in group]]) for group in groups]


def _band_groups(bands: ndarray) -> tuple[list[_Group], ndarray]:
    """(groups, rectangles that were cut off): bands that overlap, or of too many kinds, are cut first."""
    buckets = _buckets(bands)
    crowded = len(buckets) > _MAX_WINDOWS
    good = [_Group(*b) for b in buckets if not crowded and _independent(b[2])]
    poor = [b[2] for b in buckets if crowded or not _independent(b[2])]
    if not poor:
        return good, bands[:0]
    rectangles, rest = _by_kind(_cut(np.concatenate(poor)))
    return good + _groups_by_window(rest), rectangles


def _cut(bands: ndarray) -> ndarray:
    """Bands without the rows that see all their keys and the keys that all their rows see, and those besides."""
    q0, q1, k0, k1, lo, hi = bands.T[:6]
    pieces = _in_three(bands, _Q0, _Q1, k1 - 1 + lo, k0 + hi + 1)
    q0, q1, k0, k1, lo, hi = pieces.T[:6]
    return _in_three(pieces, _K0, _K1, q1 - 1 - hi, q0 - lo + 1)


def _in_three(work: ndarray, start: int, stop: int, a: ndarray, b: ndarray) -> ndarray:
    """Each row's [start, stop) cut at [a, b), where that is not empty."""
    a, b = (np.clip(x, work[:, start], work[:, stop]) for x in (a, b))
    a, b = (np.where(a < b, x, work[:, stop]) for x in (a, b))
    before, within, after = work.copy(), work.copy(), work.copy()
    before[:, stop], after[:, start] = a, b
    within[:, start], within[:, stop] = a, b
    pieces = np.concatenate((before, within, after))
    return _trimmed(pieces[pieces[:, start] < pieces[:, stop]])


def _rectangle_groups(work: ndarray) -> list[_Group]:
    """Rectangles in as few groups as their shared rows allow."""
    work = _merged(_merged(work, (_Q0, _Q1), (_K0, _K1)), (_K0, _K1), (_Q0, _Q1))
    if not len(work):
        return []
    if _independent(work):
        return [_Group(OPEN, OPEN, work[np.argsort(work[:, _Q0], kind="stable")])]
    pieces, levels = _along_tree(work)
    groups = []
    for level in np.unique(levels):
        part = pieces[levels == level]
        for colour in _colours(part):  # nodes of a level share no keys; the same node twice is one sequence
            order = np.lexsort((colour[:, _Q0], colour[:, _K0]))
            groups.append(_Group(OPEN, OPEN, colour[order]))
    return groups


def _merged(work: ndarray, same: tuple[int, int], along: tuple[int, int]) -> ndarray:
    """Rectangles with the same range on one side and neighbouring ranges on the other, made one."""
    if len(work) < 2:
        return work
    work = work[np.lexsort((work[:, along[0]], work[:, same[1]], work[:, same[0]]))]
    goes_on = (work[1:, same] == work[:-1, same]).all(1) & (work[1:, along[0]] == work[:-1, along[1]])
    starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    merged = work[starts]
    merged[:, along[1]] = np.maximum.reduceat(work[:, along[1]], starts)
    return merged


def _along_tree(work: ndarray) -> tuple[ndarray, ndarray]:
    """Rectangles cut at the nodes of binary trees over the keys, and each piece's level (twice, plus its side).

    Rectangles that share keys, directly or through others, have a tree over the points where their key ranges begin
    and end; it starts where the first of them does, so a common start needs one node a level.
    """
    work = work[np.argsort(work[:, _K0], kind="stable")]
    reach = np.maximum.accumulate(work[:, _K1])
    begins = np.concatenate(([True], work[1:, _K0] >= reach[:-1]))
    base_row = np.flatnonzero(begins)[np.cumsum(begins) - 1]
    points = np.unique(work[:, (_K0, _K1)])
    index = np.searchsorted(points, work[:, (_K0, _K1)])
    base = index[base_row, 0]
    left, right = index[:, 0] - base, index[:, 1] - base
    pieces, levels, level = [], [], 0

    def take(which: ndarray, node: ndarray, side: int) -> None:
        piece = work[which]
        piece[:, _K0] = points[base[which] + (node[which] << level)]
        piece[:, _K1] = points[base[which] + ((node[which] + 1) << level)]
        pieces.append(piece)
        levels.append(np.full(len(piece), 2 * level + side))

    while (left < right).any():
        odd = (left < right) & (left & 1 == 1)
        take(odd, left, 1)
        left = left + odd
        odd = (left < right) & (right & 1 == 1)
        right = right - odd
        take(odd, right, 0)
        left, right, level = left >> 1, right >> 1, level + 1
    return np.concatenate(pieces), np.concatenate(levels)


def _colours(work: ndarray) -> list[ndarray]:
    """The work in as few parts as it has pieces over one query row, so that each part's query rows are disjoint."""
    if _disjoint(work[:, _Q0], work[:, _Q1]):
        return [work]
    work = work[np.argsort(work[:, _Q0], kind="stable")]
    colours, ends, free = np.zeros(len(work), dtype=np.int64), [], []
    for n, (start, stop) in enumerate(work[:, (_Q0, _Q1)].tolist()):
        while ends and ends[0][0] <= start:
            heappush(free, heappop(ends)[1])
        colours[n] = heappop(free) if free else len(ends)
        heappush(ends, (stop, int(colours[n])))
    return [work[colours == c] for c in range(colours.max() + 1)]


# --- ALiBi ----------------------------------------------------------------------------------------------------------


def _signed(work: ndarray) -> ndarray:
    """The work cut so that −slope·factor·|d| − slope·shift is the bias, d = i + sk − sq − j as the kernel counts.

    In a sequence the tokens' distance is step·d + c. Where c = 0 the kernel's absolute value is the distance's, but
    for the step. Elsewhere the work is cut where the distance changes its sign, and where d does: then |distance| is
    ±(step·d + c) and |d| is ±d, so the factor is the step with both signs, and c shifts every score of the sequence.
    """
    straight = _corner_distance(work) == 0
    whole = np.column_stack((work[straight], work[straight, _STEP], np.zeros(straight.sum(), dtype=np.int64)))
    parts, rest = [whole], work[~straight]
    here = -(rest[:, _OFFSET] // rest[:, _STEP])  # the least i − j at a distance that is not negative
    for sign, half in ((1, _above(rest, here)), (-1, _below(rest, here))):
        corner = half[:, _Q1] - half[:, _K1]
        for side, piece in ((1, _above(half, corner)), (-1, _below(half, corner))):
            factor, shift = sign * side * piece[:, _STEP], sign * _corner_distance(piece)
            parts.append(np.column_stack((piece, factor, shift)))
    return np.concatenate(parts)


def _corner_distance(work: ndarray) -> ndarray:
    """The tokens' distance at the bottom-right corner."""
    return work[:, _OFFSET] + work[:, _STEP] * (work[:, _Q1] - work[:, _K1])


def _above(work: ndarray, bound: ndarray) -> ndarray:
    """The part with i − j ≥ bound."""
    work = work.copy()
    work[:, _LO] = np.maximum(work[:, _LO], bound)
    return _trimmed(work)


def _below(work: ndarray, bound: ndarray) -> ndarray:
    """The part with i − j < bound."""
    work = work.copy()
    work[:, _HI] = np.minimum(work[:, _HI], bound - 1)
    return _trimmed(work)


# --- calls ----------------------------------------------------------------------------------------------------------


def _calls(groups: list[_Group]) -> tuple[VarlenCall, ...]:
    groups = sorted(groups, key=lambda g: -int((g.work[:, _Q1] - g.work[:, _Q0]).sum()))
    touched = np.zeros(max(int(g.work[:, _Q1].max()) for g in groups), dtype=bool)
    calls = []
    for group in groups:
        rows = _rows(group.work[:, _Q0], group.work[:, _Q1])
        at = rows if isinstance(rows, slice) else rows.numpy()
        calls.append(_call(group, rows, fresh=not touched[at].any()))
        touched[at] = True
    return tuple(calls)


def _call(group: _Group, queries: Rows, *, fresh: bool) -> VarlenCall:
    work = group.work
    begins = np.concatenate(([True], work[1:, _K0] != work[:-1, _K0]))  # key ranges of a call are disjoint
    first = np.flatnonzero(begins)
    q_lengths = np.add.reduceat(work[:, _Q1] - work[:, _Q0], first)
    heads = work[first]
    k_lengths = heads[:, _K1] - heads[:, _K0]
    offsets = heads[:, _OFFSET] + heads[:, _STEP] * (heads[:, _Q0] - heads[:, _K0])
    signed = work.shape[1] > _FACTOR
    return VarlenCall(
        queries=queries,
        keys=_rows(heads[:, _K0], heads[:, _K1]),
        num_queries=int(q_lengths.sum()),
        num_keys=int(k_lengths.sum()),
        cu_seqlens_q=_cumulative(q_lengths),
        cu_seqlens_k=_cumulative(k_lengths),
        max_seqlen_q=int(q_lengths.max()),
        max_seqlen_k=int(k_lengths.max()),
        left=group.left,
        right=group.right,
        fresh=fresh,
        steps=torch.from_numpy(heads[:, _STEP].copy()),
        offsets=torch.from_numpy(offsets),
        slope_factors=torch.from_numpy(heads[:, _FACTOR].copy()) if signed else None,
        shifts=torch.from_numpy(heads[:, _SHIFT].copy()) if signed else None,
    )


def _cumulative(lengths: ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))


def _indices(starts: ndarray, stops: ndarray) -> ndarray:
    lengths = stops - starts
    shift = np.repeat(starts - np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths)
    return shift + np.arange(len(shift))


def _rows(starts: ndarray, stops: ndarray) -> Rows:
    if (starts[1:] == stops[:-1]).all():
        return slice(int(starts[0]), int(stops[-1]))
    return torch.from_numpy(_indices(starts, stops))

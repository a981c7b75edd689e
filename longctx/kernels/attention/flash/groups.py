"""Which slices of a table stand in one call of a variable-length kernel. Pure; ``calls.py`` says what a call can hold.

* A slice is trimmed until its first and last row see a key and its first and last key are seen. Then both bounds count
  from the bottom-right corner and are ≥ 0, and no row without a key ever reaches a kernel.
* Slices with the same window whose rows are disjoint are one group, however many there are: all documents of a batch.
* Rectangles that share keys (in the ``balanced`` layout every chunk of a document sees a longer prefix of another
  rank's rows) are cut along a binary tree over the key axis. At each level of the tree a rectangle has at most one node
  on its left and one on its right border, so n steps of a staircase take log₂ n groups, not n.
* Bands that share keys or have too many different windows are cut into rectangles and square triangles.
* What still overlaps goes to as many groups as overlap.

Work is an int64 array with the columns of a table of slices, where ±``_FAR`` stands for an open bound.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy import ndarray
from torch import Tensor

from longctx.kernels.attention.slices import HI, K_START, K_STOP, LO, OPEN, Q_START, Q_STOP, STEP

UNBOUNDED = -1
"""A window's side without a bound."""

_FAR = 1 << 40
"""Stands for an open bound in arithmetic; beyond any row index, and far from overflow."""
_MAX_WINDOWS = 4
"""Different windows that bands may bring before they are cut into fewer kinds."""


class Group(NamedTuple):
    """Work for one call: rows in the order they are packed; rows with the same key range are one sequence."""

    left: int
    right: int
    work: ndarray


def group_slices(slices: Tensor, *, distances: bool) -> list[Group]:
    """The groups that together hold every slice exactly once; ``distances`` joins and cuts none."""
    work = trimmed(slices)
    if not len(work):
        return []
    if distances:
        return groups_by_window(work)
    full = (work[:, LO] == -_FAR) & (work[:, HI] == _FAR)
    groups, cut_off = _band_groups(work[~full])
    groups, rectangles = _absorbed(groups, np.concatenate((work[full], cut_off)))
    return groups + _rectangle_groups(rectangles)


# --- trimming and windows -----------------------------------------------------------------------------------------


def trimmed(slices: Tensor) -> ndarray:
    """The table's work without rows that see nothing, keys that nobody sees, and bounds that hold anyway."""
    work = slices.numpy().copy()
    work[work[:, LO] == OPEN, LO] = -_FAR
    work[work[:, HI] == OPEN, HI] = _FAR
    return _trimmed(work)


def _trimmed(work: ndarray) -> ndarray:
    q0, q1, k0, k1, lo, hi = work.T[:STEP]
    first, last = np.maximum(q0, k0 + lo), np.minimum(q1, k1 + hi)
    near, far = np.minimum(k1, q1 - lo), np.maximum(k0, q0 - hi)
    work = work.copy()
    work[:, Q_START], work[:, Q_STOP], work[:, K_START], work[:, K_STOP] = first, last, far, near
    work = work[(first < last) & (far < near) & (lo <= hi)]
    q0, q1, k0, k1, lo, hi = work.T[:STEP]
    work[:, LO] = np.where(lo <= q0 - (k1 - 1), -_FAR, lo)
    work[:, HI] = np.where(hi >= q1 - 1 - k0, _FAR, hi)
    return work


def _windows(work: ndarray) -> ndarray:
    """(left, right) of each row of trimmed work, [n, 2]."""
    lo, hi = work[:, LO], work[:, HI]
    corner = work[:, Q_STOP] - work[:, K_STOP]  # i − j at the bottom-right corner, where the kernel counts 0
    left = np.where(hi == _FAR, UNBOUNDED, hi - corner)
    right = np.where(lo == -_FAR, UNBOUNDED, corner - lo)
    return np.stack((left, right), 1)


def _disjoint(starts: ndarray, stops: ndarray) -> bool:
    order = np.argsort(starts, kind="stable")
    return bool((stops[order][:-1] <= starts[order][1:]).all())


def _independent(work: ndarray) -> bool:
    return _disjoint(work[:, Q_START], work[:, Q_STOP]) and _disjoint(work[:, K_START], work[:, K_STOP])


def _by_first_row(work: ndarray) -> ndarray:
    return work[np.argsort(work[:, Q_START], kind="stable")]


# --- one group a window ---------------------------------------------------------------------------------------------


def groups_by_window(work: ndarray) -> list[Group]:
    """The work by window, and within a window by what can stand in one call."""
    return [group for bucket in _buckets(work) for group in _first_fit(bucket)]


def _buckets(work: ndarray) -> list[Group]:
    """The work of every window that occurs, sorted by first query row, whether or not its rows are disjoint."""
    if not len(work):
        return []
    work = _by_first_row(work)
    kinds, index = np.unique(_joined(_windows(work), work), axis=0, return_inverse=True)
    index = index.reshape(-1)
    return [Group(int(left), int(right), work[index == n]) for n, (left, right) in enumerate(kinds)]


def _joined(windows: ndarray, work: ndarray) -> ndarray:
    """Windows in which an open side takes a neighbour's bound that does not bind it: short documents join long ones."""
    windows = windows.copy()
    for side, length in ((0, work[:, K_STOP] - work[:, K_START]), (1, work[:, Q_STOP] - work[:, Q_START])):
        other = windows[:, 1 - side]
        bounded = windows[:, side] != UNBOUNDED
        for kind in np.unique(other[bounded]):
            bound = windows[bounded & (other == kind), side].max()
            windows[~bounded & (other == kind) & (length - 1 <= bound), side] = bound
    return windows


def _first_fit(bucket: Group) -> list[Group]:
    """One group where all rows are disjoint, else each piece in the first group that it does not overlap."""
    if _independent(bucket.work):
        return [bucket]
    groups: list[list[tuple[int, list[int]]]] = []
    for n, piece in enumerate(bucket.work[:, :LO].tolist()):
        group = next((g for g in groups if _fits(piece, [other for _, other in g])), None)
        if group is None:
            group = []
            groups.append(group)
        group.append((n, piece))
    return [bucket._replace(work=bucket.work[[n for n, _ in group]]) for group in groups]


def _fits(piece: list[int], others: list[list[int]]) -> bool:
    """Whether a piece overlaps none of the others, which come before it in the order of query rows."""
    q0, _, k0, k1 = piece
    return others[-1][1] <= q0 and all(k1 <= other[2] or other[3] <= k0 for other in others)


def _absorbed(groups: list[Group], rectangles: ndarray) -> tuple[list[Group], ndarray]:
    """The groups with those rectangles that their window does not bind, and the rest: documents of one token."""
    found = []
    for group in groups:
        fits = np.ones(len(rectangles), dtype=bool)
        for bound, start, stop in ((group.left, K_START, K_STOP), (group.right, Q_START, Q_STOP)):
            if bound != UNBOUNDED:
                fits &= rectangles[:, stop] - rectangles[:, start] - 1 <= bound
        both = np.concatenate((group.work, rectangles[fits]))
        if fits.any() and _independent(both):
            group = group._replace(work=_by_first_row(both))
            rectangles = rectangles[~fits]
        found.append(group)
    return found, rectangles


# --- bands that overlap, or of too many kinds -----------------------------------------------------------------------


def _band_groups(bands: ndarray) -> tuple[list[Group], ndarray]:
    """(groups, rectangles that were cut off them)."""
    buckets = _buckets(bands)
    crowded = len(buckets) > _MAX_WINDOWS
    good = [bucket for bucket in buckets if not crowded and _independent(bucket.work)]
    poor = [bucket.work for bucket in buckets if crowded or not _independent(bucket.work)]
    if not poor:
        return good, bands[:0]
    pieces = _cut(np.concatenate(poor))
    full = (pieces[:, LO] == -_FAR) & (pieces[:, HI] == _FAR)
    return good + groups_by_window(pieces[~full]), pieces[full]


def _cut(bands: ndarray) -> ndarray:
    """Bands without the rows that see all their keys and the keys that all their rows see, and those besides."""
    _, _, k0, k1, lo, hi = bands.T[:STEP]
    pieces = _in_three(bands, Q_START, Q_STOP, k1 - 1 + lo, k0 + hi + 1)
    q0, q1, _, _, lo, hi = pieces.T[:STEP]
    return _in_three(pieces, K_START, K_STOP, q1 - 1 - hi, q0 - lo + 1)


def _in_three(work: ndarray, start: int, stop: int, a: ndarray, b: ndarray) -> ndarray:
    """Each row's [start, stop) cut at [a, b), where that is not empty."""
    a, b = (np.clip(x, work[:, start], work[:, stop]) for x in (a, b))
    a, b = (np.where(a < b, x, work[:, stop]) for x in (a, b))
    before, within, after = work.copy(), work.copy(), work.copy()
    before[:, stop], after[:, start] = a, b
    within[:, start], within[:, stop] = a, b
    pieces = np.concatenate((before, within, after))
    return _trimmed(pieces[pieces[:, start] < pieces[:, stop]])


# --- rectangles -----------------------------------------------------------------------------------------------------


def _rectangle_groups(work: ndarray) -> list[Group]:
    """Rectangles in as few groups as their shared rows allow."""
    work = _merged(work, same=(Q_START, Q_STOP), along=(K_START, K_STOP))
    work = _merged(work, same=(K_START, K_STOP), along=(Q_START, Q_STOP))
    if not len(work):
        return []
    if _independent(work):
        return [Group(UNBOUNDED, UNBOUNDED, _by_first_row(work))]
    pieces, levels = _along_tree(work)
    groups = []
    for level in np.unique(levels):
        # nodes of a level share no keys; the same node twice is one sequence
        for colour in _colours(pieces[levels == level]):
            order = np.lexsort((colour[:, Q_START], colour[:, K_START]))
            groups.append(Group(UNBOUNDED, UNBOUNDED, colour[order]))
    return groups


def _merged(work: ndarray, *, same: tuple[int, int], along: tuple[int, int]) -> ndarray:
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
    and end. The tree starts where the first of them does, so rectangles of a common start have one node a level.
    """
    work, base, left, right, points = _on_points(work)
    pieces, levels, level = [], [], 0

    def take(which: ndarray, node: ndarray, side: int) -> None:
        """Cut one node off the rectangles."""
        piece = work[which]
        piece[:, K_START] = points[base[which] + (node[which] << level)]
        piece[:, K_STOP] = points[base[which] + ((node[which] + 1) << level)]
        pieces.append(piece)
        levels.append(np.full(len(piece), 2 * level + side))

    # a range of nodes gives off its odd border nodes, and is a range of half as many nodes one level up
    while (left < right).any():
        odd = (left < right) & (left & 1 == 1)
        take(odd, left, 1)
        left = left + odd
        odd = (left < right) & (right & 1 == 1)
        right = right - odd
        take(odd, right, 0)
        left, right, level = left >> 1, right >> 1, level + 1
    return np.concatenate(pieces), np.concatenate(levels)


def _on_points(work: ndarray) -> tuple[ndarray, ndarray, ndarray, ndarray, ndarray]:
    """The work by first key, each row's base (its tree's first point), its key range in points from there, the points.

    A tree ends where no rectangle reaches over to the next one.
    """
    work = work[np.argsort(work[:, K_START], kind="stable")]
    reach = np.maximum.accumulate(work[:, K_STOP])
    begins = np.concatenate(([True], work[1:, K_START] >= reach[:-1]))
    first_of_tree = np.flatnonzero(begins)[np.cumsum(begins) - 1]
    points = np.unique(work[:, (K_START, K_STOP)])
    index = np.searchsorted(points, work[:, (K_START, K_STOP)])
    base = index[first_of_tree, 0]
    return work, base, index[:, 0] - base, index[:, 1] - base, points


def _colours(work: ndarray) -> list[ndarray]:
    """The work in as few parts as it has pieces over one query row, so that each part's query rows are disjoint."""
    if _disjoint(work[:, Q_START], work[:, Q_STOP]):
        return [work]
    work = _by_first_row(work)
    colours = np.zeros(len(work), dtype=np.int64)
    ends: list[tuple[int, int]] = []  # (last row, colour) of the pieces that are open, the first to end on top
    free: list[int] = []
    num_colours = 0
    for n, (start, stop) in enumerate(work[:, (Q_START, Q_STOP)].tolist()):
        while ends and ends[0][0] <= start:
            heappush(free, heappop(ends)[1])
        if free:
            colour = heappop(free)
        else:
            colour, num_colours = num_colours, num_colours + 1
        colours[n] = colour
        heappush(ends, (stop, colour))
    return [work[colours == colour] for colour in range(num_colours)]

"""Group a table's slices into calls to a variable-length kernel. Pure; ``calls.py`` describes a call.

Work is an int64 array with a slice table's columns; ±``_FAR`` represents an open bound.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy import ndarray
from torch import Tensor

from longctx.kernels.attention.slices import HI, K_START, K_STOP, LO, OPEN, Q_START, Q_STOP, STEP

UNBOUNDED = -1
"""Window side without a bound."""

_FAR = 1 << 40
"""Represents an open bound in arithmetic; beyond any row index, and far from overflow."""
_MAX_WINDOWS = 4
"""Distinct band windows allowed before bands are cut into fewer kinds."""


class Group(NamedTuple):
    """Work for one call: slices ordered by query rows, one sequence each."""

    left: int
    right: int
    work: ndarray


# Fewer groups mean fewer kernel launches and merges. The strategy:
#
# * A slice is trimmed until its first and last row see a key and its first and last key are seen. Both bounds then
#   count from the bottom-right corner and are ≥ 0, and rows without a key never reach a kernel.
# * Rectangles over the same rows and adjacent keys, or the reverse, are joined.
# * Slices with the same window that share neither rows nor keys form one group, for instance all documents in a
#   batch. Slices that share some go to as many groups as overlap.
# * Bands that overlap, or have too many different windows, are cut into rectangles and square triangles, if that
#   takes fewer groups. Sink tokens in addition to a window need it: each document then has its own window.
#
# Measured over 13,430 tables from zigzag and balanced rows (2 to 16 ranks, 32K to 1M tokens, 1 to 900 documents,
# windows with and without sink tokens): 19,022 groups, against 29,269 without joining and cutting. Cutting overlapping
# rectangles along binary trees over their keys gave 19,027.
def group_slices(slices: Tensor, *, relative_positions: bool) -> list[Group]:
    """Partition the slices into groups, one call each; with ``relative_positions`` no slice is joined or cut."""
    work = trimmed(slices)
    if not len(work):
        return []
    if relative_positions:
        return groups_by_window(work)
    is_full = _is_full(work)
    rectangles, bands = _neighbors_joined(work[is_full]), work[~is_full]
    whole = groups_by_window(np.concatenate((bands, rectangles)))
    if len(whole) == 1:
        return whole
    groups, cut_off = _band_groups(bands)
    groups, rest = _absorbed(groups, np.concatenate((rectangles, cut_off)))
    groups += groups_by_window(_neighbors_joined(rest))
    # a cut may also make more groups than it saves
    if len(groups) < len(whole):
        return groups
    return whole


# --- trimming and windows -----------------------------------------------------------------------------------------


def trimmed(slices: Tensor) -> ndarray:
    """Convert a table to work without rows that see no key, keys that no row sees, and redundant bounds."""
    work = slices.numpy().copy()
    work[work[:, LO] == OPEN, LO] = -_FAR
    work[work[:, HI] == OPEN, HI] = _FAR
    return _trimmed(work)


def _trimmed(work: ndarray) -> ndarray:
    q0, q1, k0, k1, lo, hi = work.T[:STEP]
    # Row i sees keys i − hi to i − lo: first trim rows without a key, then keys without a row.
    q_first, q_stop = np.maximum(q0, k0 + lo), np.minimum(q1, k1 + hi)
    k_first, k_stop = np.maximum(k0, q0 - hi), np.minimum(k1, q1 - lo)
    work = work.copy()
    work[:, Q_START], work[:, Q_STOP], work[:, K_START], work[:, K_STOP] = q_first, q_stop, k_first, k_stop
    work = work[(q_first < q_stop) & (k_first < k_stop) & (lo <= hi)]
    # An ineffective bound becomes open, so that slices with different bounds can share a window.
    q0, q1, k0, k1, lo, hi = work.T[:STEP]
    work[:, LO] = np.where(lo <= q0 - (k1 - 1), -_FAR, lo)
    work[:, HI] = np.where(hi >= q1 - 1 - k0, _FAR, hi)
    return work


def _windows(work: ndarray) -> ndarray:
    """Return (left, right) for each row of trimmed work, [n, 2]."""
    lo, hi = work[:, LO], work[:, HI]
    bottom_right = work[:, Q_STOP] - work[:, K_STOP]  # i − j at the bottom-right corner, where the kernel counts 0
    left = np.where(hi == _FAR, UNBOUNDED, hi - bottom_right)
    right = np.where(lo == -_FAR, UNBOUNDED, bottom_right - lo)
    return np.stack((left, right), 1)


def _is_full(work: ndarray) -> ndarray:
    """Return a mask that selects the rectangles in trimmed work."""
    return (work[:, LO] == -_FAR) & (work[:, HI] == _FAR)


def _disjoint(starts: ndarray, ends: ndarray) -> bool:
    """Return whether all ranges are disjoint."""
    order = np.argsort(starts, kind="stable")
    return bool((ends[order][:-1] <= starts[order][1:]).all())


def _independent(work: ndarray) -> bool:
    """Return whether all the work fits into one call."""
    return _disjoint(work[:, Q_START], work[:, Q_STOP]) and _disjoint(work[:, K_START], work[:, K_STOP])


def _by_first_row(work: ndarray) -> ndarray:
    return work[np.argsort(work[:, Q_START], kind="stable")]


# --- one group a window ---------------------------------------------------------------------------------------------


def groups_by_window(work: ndarray) -> list[Group]:
    """Group the work by window, then split each window's work into parts that fit into one call."""
    return [group for bucket in _buckets(work) for group in _first_fit(bucket)]


def _buckets(work: ndarray) -> list[Group]:
    """Return one group per distinct window, sorted by first query row; its rows may overlap."""
    if not len(work):
        return []
    work = _by_first_row(work)
    kinds, index = np.unique(_joined(_windows(work), work), axis=0, return_inverse=True)
    index = index.reshape(-1)
    return [Group(int(left), int(right), work[index == n]) for n, (left, right) in enumerate(kinds)]


def _joined(windows: ndarray, work: ndarray) -> ndarray:
    """Replace open sides with another window's bound if that bound has no effect there.

    This lets short documents join long ones.
    """
    windows = windows.copy()
    for side, length in ((0, work[:, K_STOP] - work[:, K_START]), (1, work[:, Q_STOP] - work[:, Q_START])):
        other = windows[:, 1 - side]
        bounded = windows[:, side] != UNBOUNDED
        for kind in np.unique(other[bounded]):
            # in a slice no longer than bound + 1, no two tokens are farther apart than the bound
            bound = windows[bounded & (other == kind), side].max()
            windows[~bounded & (other == kind) & (length - 1 <= bound), side] = bound
    return windows


def _first_fit(bucket: Group) -> list[Group]:
    """Return one group if all rows are disjoint, else put each slice into the first group without overlap."""
    if _independent(bucket.work):
        return [bucket]
    ranges = bucket.work[:, :LO].tolist()
    groups: list[list[int]] = []
    for n, piece in enumerate(ranges):
        for group in groups:
            if _fits(piece, [ranges[other] for other in group]):
                group.append(n)
                break
        else:
            groups.append([n])
    return [bucket._replace(work=bucket.work[group]) for group in groups]


def _fits(piece: list[int], others: list[list[int]]) -> bool:
    """Return whether a slice overlaps none of the others, which precede it in query row order."""
    q_start, _, k_start, k_stop = piece
    # the others' query rows are disjoint and ascend: the last one ends last
    if others[-1][Q_STOP] > q_start:
        return False
    return all(k_stop <= other[K_START] or other[K_STOP] <= k_start for other in others)


def _absorbed(groups: list[Group], rectangles: ndarray) -> tuple[list[Group], ndarray]:
    """Add to each group the rectangles that its window does not restrict; return the groups and the remaining
    rectangles.

    Such small rectangles are a striped document's single token on this rank, or the end of a window.
    """
    found = []
    for group in groups:
        # In a rectangle with n keys and m rows, keys are at most n − 1 to the left and m − 1 to the right.
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
    """Return groups for the bands, and the rectangles cut off in the process."""
    buckets = _buckets(bands)
    crowded = len(buckets) > _MAX_WINDOWS
    # Keep a group intact or cut it; with many windows cut all, because equal squares can share a call.
    kept_groups, to_cut = [], []
    for bucket in buckets:
        if not crowded and _independent(bucket.work):
            kept_groups.append(bucket)
        else:
            to_cut.append(bucket.work)
    if not to_cut:
        return kept_groups, bands[:0]
    pieces = _cut(np.concatenate(to_cut))
    is_full = _is_full(pieces)
    return kept_groups + groups_by_window(pieces[~is_full]), pieces[is_full]


def _cut(bands: ndarray) -> ndarray:
    """Cut off rows that see all keys in their band, and keys that all rows see; return all resulting slices."""
    # rows between the two bounds' corners see every key; the rest above and below has one bound each
    _, _, k0, k1, lo, hi = bands.T[:STEP]
    pieces = _in_three(bands, Q_START, Q_STOP, k1 - 1 + lo, k0 + hi + 1)
    q0, q1, _, _, lo, hi = pieces.T[:STEP]
    return _in_three(pieces, K_START, K_STOP, q1 - 1 - hi, q0 - lo + 1)


def _in_three(work: ndarray, start: int, stop: int, a: ndarray, b: ndarray) -> ndarray:
    """Cut each row's range [start, stop) at a and b, if [a, b) is not empty."""
    a, b = (np.clip(x, work[:, start], work[:, stop]) for x in (a, b))
    a, b = (np.where(a < b, x, work[:, stop]) for x in (a, b))
    before, within, after = work.copy(), work.copy(), work.copy()
    before[:, stop], after[:, start] = a, b
    within[:, start], within[:, stop] = a, b
    pieces = np.concatenate((before, within, after))
    return _trimmed(pieces[pieces[:, start] < pieces[:, stop]])


# --- rectangles -----------------------------------------------------------------------------------------------------


def _neighbors_joined(work: ndarray) -> ndarray:
    """Merge rectangles with the same rows and adjacent keys, then those with the same keys and adjacent rows."""
    work = _merged(work, same=(Q_START, Q_STOP), along=(K_START, K_STOP))
    return _merged(work, same=(K_START, K_STOP), along=(Q_START, Q_STOP))


def _merged(work: ndarray, *, same: tuple[int, int], along: tuple[int, int]) -> ndarray:
    """Merge rectangles with equal ranges on one side and adjacent ranges on the other."""
    if len(work) < 2:
        return work
    work = work[np.lexsort((work[:, along[0]], work[:, same[1]], work[:, same[0]]))]
    is_continuation = (work[1:, same] == work[:-1, same]).all(1) & (work[1:, along[0]] == work[:-1, along[1]])
    starts = np.flatnonzero(np.concatenate(([True], ~is_continuation)))
    merged = work[starts]
    merged[:, along[1]] = np.maximum.reduceat(work[:, along[1]], starts)
    return merged

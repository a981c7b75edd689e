"""RowRanges: local rows to send, and their offsets among the received rows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor


class RowRanges:
    """Ascending, disjoint row ranges [start, stop).

    Derived data (device index, offsets within other ranges) is built once.
    """

    def __init__(self, starts: ndarray, ends: ndarray) -> None:
        """Store ascending, disjoint ranges; ``union`` builds such ranges from any."""
        self.starts, self.ends = starts, ends
        self._index: dict[torch.device, Tensor] = {}
        self._packed_positions: list[tuple[RowRanges, RowRanges]] = []

    @classmethod
    def whole(cls, num_rows: int) -> RowRanges:
        """Return rows [0, num_rows) as one range."""
        return cls(np.array([0]), np.array([num_rows]))

    @classmethod
    def union(cls, parts: Sequence[RowRanges]) -> RowRanges:
        """Return the rows that at least one part contains."""
        return union(np.concatenate([p.starts for p in parts]), np.concatenate([p.ends for p in parts]))

    def __len__(self) -> int:
        """Return the number of ranges."""
        return len(self.starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self.starts.tolist(), self.ends.tolist(), strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowRanges):
            return NotImplemented
        return np.array_equal(self.starts, other.starts) and np.array_equal(self.ends, other.ends)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RowRanges({list(self)})"

    @cached_property
    def num_rows(self) -> int:
        """Number of rows in the ranges."""
        return int((self.ends - self.starts).sum())

    def index(self, device: torch.device) -> Tensor:
        """Return all row indices, concatenated."""
        if device not in self._index:
            # Built on the CPU and copied once: every layer in a batch uses the same rows.
            lengths = self.ends - self.starts
            rows = np.arange(self.num_rows) + np.repeat(self._unpacking_shifts, lengths)
            self._index[device] = torch.from_numpy(rows).to(device, non_blocking=True)
        return self._index[device]

    def packing_shifts(self, rows: ndarray) -> ndarray:
        """Return how far each of these rows, which the ranges contain, moves if the ranges are packed together."""
        return -self._unpacking_shifts[np.searchsorted(self.starts, rows, side="right") - 1]

    def positions_in(self, within: RowRanges) -> RowRanges:
        """Return these rows' offsets among the packed rows of ``within``, which must contain them all."""
        # Look up by identity: comparing ranges costs as much as the computation, and the list is short.
        for known, positions in self._packed_positions:
            if known is within:
                return positions
        shifts = within.packing_shifts(self.starts)
        positions = RowRanges(self.starts + shifts, self.ends + shifts)
        self._packed_positions.append((within, positions))
        return positions

    @cached_property
    def _unpacking_shifts(self) -> ndarray:
        """How far each range's rows move from their packed offsets."""
        lengths = self.ends - self.starts
        return self.starts - (np.cumsum(lengths) - lengths)


def union(starts: ndarray, ends: ndarray) -> RowRanges:
    """Merge ranges, which may overlap and be unordered."""
    # After sorting by start, a new range begins where a start exceeds all previous ends.
    order = np.argsort(starts, kind="stable")
    starts, max_ends = starts[order], np.maximum.accumulate(ends[order])
    intervals = starts[1:] > max_ends[:-1]
    first = np.flatnonzero(np.append(True, intervals)[: len(starts)])
    last = np.flatnonzero(np.append(intervals, True)[: len(starts)])
    return RowRanges(starts[first], max_ends[last])

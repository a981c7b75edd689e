"""What carries a token's rows to its experts and back: ``LocalDispatcher`` where one process holds them all.

A dispatcher that spreads experts over processes has the same protocol and lives outside this package; experts cannot
tell which one they were given. It owns no parameters.

Axes: n tiles, E experts, e experts of this process, R rows that this process sends, S rows that it receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Arrival(Protocol):
    """Rows under way."""

    def wait(self) -> Tensor:
        """The rows, once they are here. To be called once."""
        ...


class Trip(Protocol):
    """One tile's rows on their way to the processes that hold their experts, and back."""

    ends_e: Tensor
    """Where the rows of each of this process's experts end among those that arrive, int32 [e]."""

    def dispatch(self, rows_RX: Tensor) -> Arrival:
        """Send [R, …] rows, sorted by expert; [S, …] arrive, sorted by this process's experts. Collective."""
        ...

    def combine(self, rows_SX: Tensor) -> Arrival:
        """Send [S, …] rows back to where they came from; [R, …] arrive in the order they were sent in. Collective."""
        ...


class TokenDispatcher(Protocol):
    """Where the experts of a layer live."""

    share: slice
    """Which of the experts this process holds."""

    def plan(self, counts_nE: Tensor) -> list[Trip]:
        """One trip for each tile of tokens, from this process's rows for each expert, int64 [n, E]. Collective.

        Every process that shares the experts has as many tiles; any number of rows, also none.
        """
        ...

    def gather(self, values_NX: Tensor) -> Tensor:
        """[P, …]: these [N, …] of every process that shares the sequence, this process's among them. Collective."""
        ...


RECOMPUTE = ("none", "activation", "all")
"""What backward forms again of an expert: nothing, its activation, or all but the tokens it was given."""


@dataclass(frozen=True, eq=False)
class ExpertRun:
    """How a forward pass runs its experts."""

    dispatcher: TokenDispatcher
    tile_tokens: int = 0
    """Tokens of this process whose rows travel at a time, while the tile before computes; 0 is all at once."""
    recompute: str = "activation"
    """One of ``RECOMPUTE``. With all, tiles bound the memory of backward too, and rows travel once more in it."""


@dataclass(frozen=True)
class _Here:
    """Rows that never left."""

    rows_RX: Tensor

    def wait(self) -> Tensor:
        return self.rows_RX


@dataclass(frozen=True)
class _NoTrip:
    ends_e: Tensor

    def dispatch(self, rows_RX: Tensor) -> Arrival:
        return _Here(rows_RX)

    def combine(self, rows_SX: Tensor) -> Arrival:
        return _Here(rows_SX)


class LocalDispatcher:
    """All experts are here."""

    share = slice(None)

    def plan(self, counts_nE: Tensor) -> list[Trip]:
        """Rows stay where they are; nothing waits for the device."""
        return [_NoTrip(ends_E) for ends_E in counts_nE.cumsum(1, dtype=torch.int32).unbind()]

    def gather(self, values_NX: Tensor) -> Tensor:
        """The values themselves."""
        return values_NX

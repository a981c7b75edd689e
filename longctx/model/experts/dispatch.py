"""What carries tokens to their experts and back: ``LocalDispatcher`` where one process holds them all.

A dispatcher that spreads experts over processes has the same protocol and lives outside this package; experts cannot
tell which one they were given. It owns no parameters. A token travels once to each process that holds any of its
experts, however many of them, and one sum of what these made of it travels back.

Axes: N tokens of this process, n of one tile of them, S tokens that arrive for a tile, k experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from longctx.kernels.processor import Products

T_co = TypeVar("T_co", covariant=True)


class Arrival(Protocol[T_co]):
    """Something under way."""

    def wait(self) -> T_co:
        """What it is, once it is here. To be called once."""
        ...


class Trip(Protocol):
    """One tile's tokens on their way to the processes that hold their experts, and back."""

    @property
    def num_rows(self) -> int | None:
        """Choices among those that arrive for which this process has the expert; None where only the device knows."""
        ...

    def dispatch(self, of_tokens_nX: Tensor, communication_dtype: torch.dtype) -> Arrival[Tensor]:
        """Send something of every token to its experts, as ``communication_dtype``; [S, …] arrive. Collective."""
        ...

    def dispatch_choices(self, gates_nk: Tensor) -> Arrival[tuple[Tensor, Tensor]]:
        """Send which experts and with what gates. Collective.

        [S, k] each arrive: gates, and ids that count from this process's first expert, −1 for an expert elsewhere.
        """
        ...

    def combine(self, of_tokens_SX: Tensor, communication_dtype: torch.dtype) -> Arrival[Tensor]:
        """Send what was made of every token back, as ``communication_dtype``. Collective.

        Its sums over processes arrive, [n, …], added in a fixed order in float32 (float64 for float64).
        """
        ...

    def bytes_sent(self, bytes_per_token: int) -> int:
        """Bytes that ``dispatch`` of so many for a token sends to other processes."""
        ...


class TokenDispatcher(Protocol):
    """Where the experts of a layer live."""

    share: slice
    """Which of the experts this process holds."""
    travels: bool
    """Whether tokens leave this process."""

    def plan(self, experts_Nk: Tensor, tiles: Sequence[slice]) -> list[Any]:
        """For each tile of tokens what ``trip`` wants to know: how much will travel, no tensors. Collective.

        Every process that shares the experts has as many tiles; any number of tokens, also none.
        """
        ...

    def trip(self, experts_nk: Tensor, planned: Any) -> Trip:
        """The trip of one tile. Nothing is sent yet."""
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
    """Tokens of this process that travel at a time, while the tile before computes; 0 is all at once."""
    recompute: str = "activation"
    """One of ``RECOMPUTE``. With all, tiles bound the memory of backward too, and tokens travel once more in it."""
    products: Products = "native"
    """How a CPU multiplies bfloat16."""


V = TypeVar("V")


@dataclass(frozen=True)
class Here(Generic[V]):
    """What never left."""

    value: V

    def wait(self) -> V:
        """The thing itself."""
        return self.value


@dataclass(frozen=True)
class _NoTrip:
    experts_nk: Tensor
    num_rows: int | None = None

    def dispatch(self, of_tokens_nX: Tensor, communication_dtype: torch.dtype) -> Arrival[Tensor]:
        return Here(of_tokens_nX)

    def dispatch_choices(self, gates_nk: Tensor) -> Arrival[tuple[Tensor, Tensor]]:
        return Here((gates_nk, self.experts_nk))

    def combine(self, of_tokens_SX: Tensor, communication_dtype: torch.dtype) -> Arrival[Tensor]:
        return Here(of_tokens_SX)

    def bytes_sent(self, bytes_per_token: int) -> int:
        return 0


class LocalDispatcher:
    """All experts are here, and nothing waits for the device."""

    share = slice(None)
    travels = False

    def plan(self, experts_Nk: Tensor, tiles: Sequence[slice]) -> list[Any]:
        """Nothing to know."""
        return [None] * len(tiles)

    def trip(self, experts_nk: Tensor, planned: Any) -> Trip:
        """Tokens stay where they are, in the dtype that they have."""
        return _NoTrip(experts_nk)

    def gather(self, values_NX: Tensor) -> Tensor:
        """The values themselves."""
        return values_NX


def tiles_of(num_tokens: int, tile_tokens: int) -> list[slice]:
    """Tiles of that many tokens, the last one shorter; one tile where they are 0, or no tokens."""
    size = tile_tokens or num_tokens
    if not num_tokens:
        return [slice(0, 0)]
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]

"""Token dispatch: tokens are sent to the processes that hold their experts, and the results are combined.

    sizes = dispatcher.plan(experts_Nk, tiles)                    # how much each tile sends and receives
    handle = dispatcher.handle(experts_Nk[tile], sizes[number])   # of one tile
    x_SM = handle.dispatch(x_NM[tile], dtype).wait()
    gates_Sk, local_experts_Sk = handle.dispatch_routing(gates_Nk[tile]).wait()
    out_nM = handle.combine(out_SM, dtype).wait()

``TokenDispatcher`` itself belongs to a process that holds all experts. Those that spread experts over processes derive
from it and are outside this package; experts do not know which one they were given. It owns no parameters.
A token is sent once to each process that holds any of its experts, however many, and one sum comes back from each.

Axes: N tokens of this process, n of one tile, S tokens that arrive for a tile, k experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from longctx.kernels.processor import Products

V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)


class Pending(Protocol[V_co]):
    """A result that is on its way."""

    def wait(self) -> V_co:
        """Return the result once it is here. To be called once."""
        ...


@dataclass(frozen=True)
class Ready(Generic[V]):
    """A result that is here already."""

    value: V

    def wait(self) -> V:
        """Return the result."""
        return self.value


class DispatchSizes(NamedTuple):
    """Number of tokens of one tile that are sent and received; empty if no token leaves the process."""

    send_counts: tuple[int, ...] = ()
    """Tokens that this process sends to each process that shares the experts, itself among them."""
    recv_counts: tuple[int, ...] = ()
    """Tokens that it receives from each of them."""
    num_assignments: int | None = None
    """Assignments of the received tokens that have their expert here; None where only the device knows."""
    layer: int = -1
    """The layer that the tile is of, where the dispatcher knows it: for messages about what is sent."""


class DispatchHandle:
    """One tile's tokens on their way to their experts and back; here they are with their experts already."""

    def __init__(self, experts_nk: Tensor, num_assignments: int | None = None) -> None:
        """Set the ids, and the number of received assignments with their expert here (None: only the device knows)."""
        self.experts_nk, self.num_assignments = experts_nk, num_assignments

    def dispatch(self, of_tokens_nX: Tensor, communication_dtype: torch.dtype) -> Pending[Tensor]:
        """Send a value of every token to its experts, as ``communication_dtype``; [S, …] arrive. Collective."""
        return Ready(of_tokens_nX)

    def dispatch_routing(self, gates_nk: Tensor) -> Pending[tuple[Tensor, Tensor]]:
        """Send every token's gates and expert ids to its experts. Collective.

        [S, k] each arrive: gates, and ids that count from this process's first expert, −1 for an expert elsewhere.
        """
        return Ready((gates_nk, self.experts_nk))

    def combine(self, of_tokens_SX: Tensor, communication_dtype: torch.dtype) -> Pending[Tensor]:
        """Send the result for every token back to its owner, as ``communication_dtype``. Collective.

        The sums over processes arrive, [n, …], added in a fixed order in float32 (float64 for float64).
        """
        return Ready(of_tokens_SX)


class TokenDispatcher:
    """Dispatcher to the experts of a layer: here all are on this process, so that no token is sent or waited for."""

    local_experts = slice(None)
    """The experts whose weights this process holds."""
    is_distributed = False
    """Whether tokens leave this process."""

    def plan(self, experts_Nk: Tensor, tiles: Sequence[slice]) -> list[DispatchSizes]:
        """Agree on the number of tokens that each tile will send and receive. Collective.

        All processes that share the experts have equally many tiles, with any number of tokens, also none.
        """
        return [DispatchSizes() for _ in tiles]

    def handle(self, experts_nk: Tensor, sizes: DispatchSizes) -> DispatchHandle:
        """Return the handle of one tile, without sending yet."""
        return DispatchHandle(experts_nk)

    def of_replicated(self) -> TokenDispatcher:
        """Return the dispatcher of tokens that all processes of the sequence have: each goes to its experts once."""
        return self

    def gather(self, values_NX: Tensor) -> Tensor:
        """Gather these [N, …] of every process that shares the sequence, including this one, to [P, …]. Collective."""
        return values_NX


RECOMPUTE = ("none", "activation", "all")
"""What backward recomputes of an expert: nothing, its activation, or all but the tokens it was given."""


@dataclass(frozen=True, eq=False)
class ExpertRun:
    """Options of a forward pass for running its experts."""

    dispatcher: TokenDispatcher = field(default_factory=TokenDispatcher)
    tile_tokens: int = 0
    """Tokens of this process that are dispatched at a time, while the tile before computes; 0 is all at once."""
    recompute: str = "activation"
    """One of ``RECOMPUTE``. With all, tiles bound the memory of backward too, and it dispatches tokens once more."""
    products: Products = "native"
    """How a CPU multiplies bfloat16."""


def tiles_of(num_tokens: int, tile_tokens: int) -> list[slice]:
    """Return tiles of ``tile_tokens`` tokens, the last one shorter; one tile if that is 0 or there are no tokens."""
    if not num_tokens:
        return [slice(0, 0)]
    size = tile_tokens or num_tokens
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]

"""Token dispatch: send tokens to the processes that hold their experts, and combine the results.

    sizes = dispatcher.plan(experts_Nk, tiles)                    # how much each tile sends and receives
    handle = dispatcher.handle(experts_Nk[tile], sizes[number])   # for one tile
    x_SM = handle.dispatch(x_NM[tile], dtype).wait()
    gates_Sk, local_experts_Sk = handle.dispatch_routing(gates_Nk[tile]).wait()
    out_nM = handle.combine(out_SM, dtype).wait()

``TokenDispatcher`` itself is for a process that holds all experts. Dispatchers for expert parallelism derive from it
and are outside this package; experts do not distinguish them. It owns no parameters.

Axes: N tokens of this process, n tokens in one tile, S tokens received for a tile, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from longctx.kernels.processor import MatmulMode

V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)


class Pending(Protocol[V_co]):
    """A result in flight."""

    def wait(self) -> V_co:
        """Wait for the result and return it; call once."""
        ...


@dataclass(frozen=True)
class Ready(Generic[V]):
    """A result that is available already."""

    value: V

    def wait(self) -> V:
        """Return the result."""
        return self.value


class DispatchSizes(NamedTuple):
    """Tokens that one tile sends and receives; empty if no token leaves the process."""

    send_counts: tuple[int, ...] = ()
    """Tokens that this process sends to each process that shares the experts, including itself."""
    recv_counts: tuple[int, ...] = ()
    """Tokens that it receives from each of them."""
    num_assignments: int | None = None
    """Received assignments with a local expert; None if only the device knows."""
    layer: int = -1
    """The tile's layer, if the dispatcher knows it, for texts that name the transfer."""


class DispatchHandle:
    """One tile's tokens on their way to experts and back; here they are at their experts already."""

    def __init__(self, experts_nk: Tensor, num_assignments: int | None = None) -> None:
        """Set the ids, and the number of received assignments with a local expert (None: only the device knows)."""
        self.experts_nk, self.num_assignments = experts_nk, num_assignments

    def dispatch(self, of_tokens_nX: Tensor, communication_dtype: torch.dtype) -> Pending[Tensor]:
        """Send one value per token to its experts, as ``communication_dtype``; return [S, …] received. Collective."""
        return Ready(of_tokens_nX)

    def dispatch_routing(self, gates_nk: Tensor) -> Pending[tuple[Tensor, Tensor]]:
        """Send every token's gates and expert ids to its experts. Collective.

        Return the received gates and ids, [S, k] each; ids count from this process's first expert, −1 for a remote one.
        """
        return Ready((gates_nk, self.experts_nk))

    def combine(self, of_tokens_SX: Tensor, communication_dtype: torch.dtype) -> Pending[Tensor]:
        """Send each token's result back to its owner, as ``communication_dtype``. Collective.

        Return the sums over processes, [n, …], added in a fixed order in float32 (float64 for float64).
        """
        return Ready(of_tokens_SX)


# Dispatch and combine (DeepEP, Megatron-LM's all-to-all dispatcher). A token is sent once to each process that holds
# any of its experts, however many, and one sum comes back from each. ``plan`` exchanges the counts for all tiles first,
# so no tile is padded to a common size.
class TokenDispatcher:
    """Dispatcher to a layer's experts; here all are on this process, so that no token is sent or awaited."""

    local_experts = slice(None)
    """Slice of experts that this process holds."""
    is_distributed = False
    """True if tokens leave this process."""

    def plan(self, experts_Nk: Tensor, tiles: Sequence[slice]) -> list[DispatchSizes]:
        """Agree on the number of tokens that each tile will send and receive. Collective.

        All processes that share the experts have equally many tiles, with any number of tokens, including 0.
        """
        return [DispatchSizes() for _ in tiles]

    def handle(self, experts_nk: Tensor, sizes: DispatchSizes) -> DispatchHandle:
        """Return one tile's handle, without sending yet."""
        return DispatchHandle(experts_nk)

    def of_replicated(self) -> TokenDispatcher:
        """Return the dispatcher for tokens that all processes of the sequence have: each goes to its experts once."""
        return self

    def gather(self, values_NX: Tensor) -> Tensor:
        """Gather [N, …] from every process that shares the sequence, including this one, to [P, …]. Collective."""
        return values_NX


RECOMPUTE = ("none", "activation", "all")
"""What an expert's backward recomputes: no values, its activation, or all but its input tokens."""


@dataclass(frozen=True, eq=False)
class ExpertRun:
    """Options for running experts in a forward pass."""

    dispatcher: TokenDispatcher = field(default_factory=TokenDispatcher)
    tile_tokens: int = 0
    """Tokens of this process that are dispatched at a time, while the previous tile computes; 0 for all at once."""
    recompute: str = "activation"
    """One of ``RECOMPUTE``. With "all", tiles bound backward's memory too, and it dispatches tokens again."""
    matmul_mode: MatmulMode = "native"
    """bfloat16 matmul on a CPU."""


def tiles_of(num_tokens: int, tile_tokens: int) -> list[slice]:
    """Split tokens into tiles of ``tile_tokens``, the last one shorter; one tile if that is 0 or there are 0 tokens."""
    if not num_tokens:
        return [slice(0, 0)]
    size = tile_tokens or num_tokens
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]

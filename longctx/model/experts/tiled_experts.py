"""One layer's experts over its tokens, tile by tile: dispatch, compute, combine.

Axes: N tokens of this process, S tokens received for one tile, k experts per token, M model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.kernels.devices import on_cpu
from longctx.kernels.dtypes import accumulate_dtype
from longctx.model.experts.compute_cpu import backward_blocks, forward_blocks, forward_few
from longctx.model.experts.compute_grouped import backward_grouped, forward_grouped
from longctx.model.experts.dispatch import DispatchHandle, DispatchSizes, Pending, Ready, tiles_of
from longctx.model.experts.experts_call import DispatchedTokens, ExpertsCall, ExpertWeights, Needs
from longctx.model.experts.gradient_sum import WeightGradients

_DECODED_TOKENS = 32
"""Token limit for grouped matmuls on a CPU, if no backward pass follows."""


class Routed(NamedTuple):
    """A layer's tokens, and the experts that they are routed to."""

    x_NM: Tensor
    gates_Nk: Tensor
    experts_Nk: Tensor


def computes_in_blocks(x: Tensor) -> bool:
    """Return whether experts compute in expert blocks; accelerators use grouped matmuls."""
    return on_cpu(x)


# Tiles overlap dispatch and combine with compute: while the experts compute a tile, the next tile's tokens are on their
# way to them and the previous tile's results on their way back. Backward does the same with gradients.
#
#     tile 0   dispatch ── compute ── combine
#     tile 1        dispatch ──────── compute ── combine
#     tile 2                   dispatch ──────── compute ── combine
#
# All ranks have equally many tiles, so their collectives match in number and order.
def forward_tiles(
    routed: Routed, weights: ExpertWeights, call: ExpertsCall
) -> tuple[Tensor, list[list[Tensor]], list[DispatchSizes]]:
    """Compute Σ gate · expert(x) over each token's experts, [N, M] in float32 (float64 for float64).

    Return it with the tensors that each tile saves for backward, and the agreed sizes.
    """
    x_NM, gates_Nk, experts_Nk = routed
    dispatcher, compute = call.run.dispatcher, forward_grouped
    if computes_in_blocks(x_NM):
        compute = forward_blocks
        if is_decoding(experts_Nk, call):
            compute = forward_few
    tiles = tiles_of(len(x_NM), call.run.tile_tokens)
    sizes = dispatcher.plan(experts_Nk, tiles)

    def dispatch(number: int) -> _PendingTokens:
        tile = tiles[number]
        handle = dispatcher.handle(experts_Nk[tile], sizes[number])
        return _PendingTokens.send(handle, x_NM[tile], gates_Nk[tile])

    saved: list[list[Tensor]] = []
    outputs = TileOutputs(tiles, len(x_NM), accumulate_dtype(x_NM.dtype))
    pending = dispatch(0)
    for number in range(len(tiles)):
        handle, tokens = pending.handle, pending.wait()
        if number + 1 < len(tiles):
            pending = dispatch(number + 1)  # in flight while this tile computes
        out_SM, of_tile = compute(tokens, weights, call)
        if _saves_received(call):
            of_tile[:0] = [tokens.x_SM, tokens.gates_Sk, tokens.experts_Sk]
        saved.append(of_tile)
        outputs.add_pending(number, handle.combine(out_SM, x_NM.dtype))  # in flight while the next tile computes
    return outputs.all(), saved, sizes


def backward_tiles(
    dout_NM: Tensor,
    routed: Routed,
    weights: ExpertWeights,
    saved: list[list[Tensor]],
    sizes: list[DispatchSizes] | None,
    call: ExpertsCall,
    needs: Needs,
) -> list[Tensor | None]:
    """Compute the gradients in the order of ``Needs``.

    Tokens that were not saved on arrival are dispatched again. Saved tensors are freed right after use: weight
    gradients take their memory.
    """
    x_NM, gates_Nk, experts_Nk = routed
    dispatcher, compute = call.run.dispatcher, backward_grouped
    if computes_in_blocks(x_NM):
        compute = backward_blocks
    tiles = tiles_of(len(x_NM), call.run.tile_tokens)
    # Forward agreed on the sizes, unless recomputation skipped its dispatch.
    if sizes is None:
        sizes = dispatcher.plan(experts_Nk, tiles)

    def dispatch(number: int) -> tuple[_PendingTokens, Pending[Tensor]]:
        tile = tiles[number]
        handle = dispatcher.handle(experts_Nk[tile], sizes[number])
        if _saves_received(call):
            tokens = _PendingTokens.take_saved(handle, saved[number])
        else:
            tokens = _PendingTokens.send(handle, x_NM[tile], gates_Nk[tile])
        return tokens, handle.dispatch(dout_NM[tile], x_NM.dtype)

    gradients = WeightGradients.start(weights, needs, tiles=len(tiles))
    dx, dgates = TileOutputs(tiles, len(x_NM), x_NM.dtype), TileOutputs(tiles, len(x_NM), gates_Nk.dtype)
    pending, pending_dout = dispatch(0)
    for number in range(len(tiles)):
        handle, tokens, dout_SM = pending.handle, pending.wait(), pending_dout.wait()
        if number + 1 < len(tiles):
            pending, pending_dout = dispatch(number + 1)  # in flight while this tile computes
        dx_SM, dgates_Sk = compute(dout_SM, tokens, weights, saved[number], call, gradients=gradients, needs=needs)
        saved[number].clear()
        if dx_SM is not None:  # needed on all ranks or on no rank
            dx.add_pending(number, handle.combine(dx_SM, x_NM.dtype))
        dgates.add_pending(number, handle.combine(dgates_Sk, gates_Nk.dtype))
    dx_NM: Tensor | None = None
    if needs.x:
        dx_NM = dx.all()
    return [dx_NM, dgates.all(), *gradients.results()]


def is_decoding(experts_Nk: Tensor, call: ExpertsCall) -> bool:
    """Return whether these are generated tokens: too few for one call per expert."""
    return call.without_backward and experts_Nk.shape[0] <= _DECODED_TOKENS


def _saves_received(call: ExpertsCall) -> bool:
    """Return whether tokens are saved on arrival, so that backward need not dispatch them again."""
    return call.run.dispatcher.is_distributed and call.run.recompute != "all"


class _PendingTokens(NamedTuple):
    """One tile's tokens in flight to their experts."""

    handle: DispatchHandle
    x: Pending[Tensor]
    routing: Pending[tuple[Tensor, Tensor]]

    @classmethod
    def send(cls, handle: DispatchHandle, x_nM: Tensor, gates_nk: Tensor) -> _PendingTokens:
        """Dispatch the tokens with their gates and ids."""
        return cls(handle, handle.dispatch(x_nM, x_nM.dtype), handle.dispatch_routing(gates_nk))

    @classmethod
    def take_saved(cls, handle: DispatchHandle, saved: list[Tensor]) -> _PendingTokens:
        """Take the tokens from the tensors that forward saved on arrival."""
        x_SM, gates_Sk, experts_Sk = saved[:3]
        del saved[:3]
        return cls(handle, Ready(x_SM), Ready((gates_Sk, experts_Sk)))

    def wait(self) -> DispatchedTokens:
        """Wait for the tokens and return them."""
        x_SM = self.x.wait()
        gates_Sk, experts_Sk = self.routing.wait()
        return DispatchedTokens(x_SM, gates_Sk, experts_Sk, self.handle.num_assignments)


class TileOutputs:
    """Results for all tiles. Each tile's are awaited when the next tile's are added."""

    def __init__(self, tiles: Sequence[slice], num_tokens: int, dtype: torch.dtype) -> None:
        self._tiles, self._num_tokens, self._dtype = tiles, num_tokens, dtype
        self._whole: Tensor | None = None
        self._pending: tuple[int, Pending[Tensor]] | None = None

    def add_pending(self, number: int, pending: Pending[Tensor]) -> None:
        """Add a tile with results in flight."""
        self._finish_pending()
        self._pending = number, pending

    def all(self) -> Tensor:
        """Wait for the last tile, and return all results."""
        self._finish_pending()
        assert self._whole is not None
        return self._whole

    def _finish_pending(self) -> None:
        """Wait for the pending tile's results."""
        if self._pending is None:
            return
        number, pending = self._pending
        self._pending = None
        values_nX = pending.wait()
        if len(self._tiles) == 1:
            self._whole = values_nX.to(self._dtype)  # without a copy if the dtype matches
            return
        if self._whole is None:
            shape = list(values_nX.shape)
            shape[0] = self._num_tokens
            self._whole = values_nX.new_empty(shape, dtype=self._dtype)
        self._whole[self._tiles[number]] = values_nX

"""The routed experts: gated FFNs over a layer's tokens, wherever the experts live.

Tokens go through in tiles. While a tile's experts compute, the next tile's tokens are on their way to them and the
last one's results on their way back; in backward likewise, for gradients.

Axes: N tokens of this process, S tokens that arrive for one tile, k experts a token, M model width, F FFN width of one
expert (gate and up together: 2F), E experts, e experts of this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.config import ModelConfig
from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.graphs import outside_graphs
from longctx.kernels.processor import Products
from longctx.model.experts.compute_cpu import backward_blocks, forward_blocks
from longctx.model.experts.compute_grouped import backward_rows, forward_rows
from longctx.model.experts.dispatch import Arrival, ExpertRun, LocalDispatcher, TokenDispatcher, Trip, tiles_of
from longctx.model.experts.parts import Needs, Tokens, Weights, WeightSums, kept_widths
from longctx.model.recompute import RecomputeCache

T = TypeVar("T")


class Experts(nn.Module):
    """The experts of one layer, fused as Hugging Face keeps them in memory: gate rows first, then up rows.

    ``share`` are those whose weights are here: e of the layer's E, consecutive.
    """

    def __init__(self, config: ModelConfig, share: slice = slice(None)) -> None:
        super().__init__()
        e, M, F = len(range(config.num_experts)[share]), config.hidden_size, config.expert_ffn_size
        self.share, self.num_experts = share, config.num_experts
        self.activation = config.activation
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * F, M))
        self.down_proj = nn.Parameter(torch.empty(e, M, F))
        self.gate_up_proj_bias: nn.Parameter | None
        self.down_proj_bias: nn.Parameter | None
        biased = config.expert_bias
        self.register_parameter("gate_up_proj_bias", nn.Parameter(torch.empty(e, 2 * F)) if biased else None)
        self.register_parameter("down_proj_bias", nn.Parameter(torch.empty(e, M)) if biased else None)

    def forward(
        self,
        x_NM: Tensor,
        gates_Nk: Tensor,
        experts_Nk: Tensor,
        run: ExpertRun | None = None,
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        """Σ over a token's k experts of gate · expert(x), [N, M] in float32 (float64 for float64).

        An id of −1 leads nowhere: nothing is added, and x and gate get a gradient of exactly 0 through it. With a
        ``recompute_cache`` the result is kept for recomputation, which then computes and sends nothing; backward gets
        by with x, gates and ids. Collective where experts are spread.
        """
        run = ExpertRun(LocalDispatcher()) if run is None else run
        dispatcher = run.dispatcher
        assert dispatcher.share == self.share
        weights = (self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias)
        wants = (x_NM, gates_Nk, *(w for w in weights if w is not None))
        is_trained = torch.is_grad_enabled() and any(of.requires_grad for of in wants)
        keep = run.recompute if recompute_cache is None and is_trained else "all"
        how = (self.activation, run.tile_tokens, keep, run.products)
        given = (x_NM, gates_Nk, experts_Nk, *weights, *how, dispatcher, recompute_cache)
        return _outside_graphs(*given) if dispatcher.travels else _Experts.apply(*given)


def is_expert_weight(name: str) -> bool:
    """Whether a parameter's first axis are experts, which ranks may share out."""
    return ".mlp.experts." in name


class _How(NamedTuple):
    """What is the same for all tiles, in plain values."""

    activation: str
    tile_tokens: int
    keep: str
    products: Products


class _Experts(torch.autograd.Function):
    """Saves the parameters and no view of them: ZeRO-3 frees a gathered weight by emptying the parameter."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NM: Tensor,
        gates_Nk: Tensor,
        experts_Nk: Tensor,
        gate_up_eFM: Tensor,
        down_eMF: Tensor,
        gate_up_bias_eF: Tensor | None,
        down_bias_eM: Tensor | None,
        activation: str,
        tile_tokens: int,
        keep: str,
        products: Products,
        dispatcher: TokenDispatcher,
        recompute_cache: RecomputeCache | None,
    ) -> Tensor:
        weights = Weights(gate_up_eFM, down_eMF, gate_up_bias_eF, down_bias_eM)
        how = _How(activation, tile_tokens, keep, products)
        ctx.how, ctx.dispatcher, ctx.planned, ctx.num_kept = tuple(how), dispatcher, None, []
        known = None if recompute_cache is None else recompute_cache.load(of="experts")
        if known is not None:
            ctx.save_for_backward(x_NM, gates_Nk, experts_Nk, *weights)
            return known[0]
        if torch.compiler.is_compiling():
            out_NM, *kept = torch.ops.longctx.experts_forward.default(x_NM, gates_Nk, experts_Nk, *weights, *how)
        else:
            of_tiles: list[list[Tensor]]
            out_NM, of_tiles, ctx.planned = _forward(x_NM, gates_Nk, experts_Nk, weights, how, dispatcher)
            kept = [tensor for of_tile in of_tiles for tensor in of_tile]
            ctx.num_kept = [len(of_tile) for of_tile in of_tiles]
        if recompute_cache is not None:
            recompute_cache.save(out_NM, of="experts")
        ctx.save_for_backward(x_NM, gates_Nk, experts_Nk, *weights, *kept)
        return out_NM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_NM: Tensor):  # type: ignore[override]
        x, gates, ids, gate_up, down, gate_up_bias, down_bias, *kept = ctx.saved_tensors
        weights = Weights(gate_up, down, gate_up_bias, down_bias)
        needs = [bool(needed) for n, needed in enumerate(ctx.needs_input_grad[:7]) if n != 2]  # ids have none
        if torch.compiler.is_compiling():
            grads = torch.ops.longctx.experts_backward.default(dout_NM, x, gates, ids, *weights, kept, *ctx.how, needs)
        else:
            ctx.maybe_clear_saved_tensors()  # unless the graph is kept for another backward, what is kept is now ours
            of_tiles = [[kept.pop(0) for _ in range(count)] for count in ctx.num_kept]
            given = (dout_NM, x, gates, ids, weights, of_tiles, _How(*ctx.how), Needs(*needs))
            grads = _backward(*given, ctx.dispatcher, ctx.planned)
        dx, dgates, *dweights = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
        return dx, dgates, None, *dweights, *[None] * 6


@outside_graphs("tokens travel outside of any graph")
def _outside_graphs(*given: Any) -> Tensor:
    return _Experts.apply(*given)


def _in_blocks(x: Tensor) -> bool:
    """Whether experts compute block by block; on accelerators it is one grouped product."""
    return x.device.type == "cpu"


# --- tile by tile -------------------------------------------------------------------------------------------


def _forward(
    x_NM: Tensor,
    gates_Nk: Tensor,
    experts_Nk: Tensor,
    weights: Weights,
    how: _How,
    dispatcher: TokenDispatcher,
    *,
    in_slabs: bool = True,
) -> tuple[Tensor, list[list[Tensor]], list[Any]]:
    """The sum over experts [N, M], what is kept of every tile, and what was planned.

    ``in_slabs`` lets what is kept be as many tensors as the data asks for.
    """
    tiles = tiles_of(len(x_NM), how.tile_tokens)
    planned = dispatcher.plan(experts_Nk, tiles)
    home, kept = _Home(tiles, len(x_NM), accumulate_dtype(x_NM.dtype)), []

    def send(number: int) -> Callable[[], tuple[Trip, Tokens]]:
        tile = tiles[number]
        trip = dispatcher.trip(experts_Nk[tile], planned[number])
        return _sent(trip, x_NM[tile], gates_Nk[tile])

    for number, (trip, tokens) in enumerate(_one_ahead(send, len(tiles))):
        of = (tokens, weights, how.activation)
        if _in_blocks(x_NM):
            out_SM, of_tile = forward_blocks(*of, keep=how.keep, products=how.products, in_slabs=in_slabs)
        else:
            out_SM, of_tile = forward_rows(*of, keep=how.keep, products=how.products)
        kept.append([*(tokens[:3] if dispatcher.travels and how.keep != "all" else ()), *of_tile])
        home.expect(number, trip.combine(out_SM, x_NM.dtype))
    return home.all(), kept, planned


def _backward(
    dout_NM: Tensor,
    x_NM: Tensor,
    gates_Nk: Tensor,
    experts_Nk: Tensor,
    weights: Weights,
    kept: list[list[Tensor]],
    how: _How,
    needs: Needs,
    dispatcher: TokenDispatcher,
    planned: list[Any] | None,
    *,
    in_slabs: bool = True,
) -> list[Tensor | None]:
    """Gradients in the order of ``Needs``; tokens that were not kept where they arrived are sent again.

    What is kept is let go of as soon as it was used: gradients of the weights take its place.
    """
    tiles = tiles_of(len(x_NM), how.tile_tokens)
    if planned is None:
        planned = dispatcher.plan(experts_Nk, tiles)
    arrived = dispatcher.travels and how.keep != "all"
    sums = WeightSums.start(weights, needs, tiles=len(tiles))
    dx_home, dgates_home = (_Home(tiles, len(x_NM), of.dtype) for of in (x_NM, gates_Nk))

    def send(number: int) -> Callable[[], tuple[Trip, Tokens, Tensor]]:
        tile = tiles[number]
        trip = dispatcher.trip(experts_Nk[tile], planned[number])
        tokens = None if arrived else _sent(trip, x_NM[tile], gates_Nk[tile])
        dout = trip.dispatch(dout_NM[tile], x_NM.dtype)

        def arrive() -> tuple[Trip, Tokens, Tensor]:
            if tokens is not None:
                return *tokens(), dout.wait()
            x_SM, gates_Sk, experts_Sk = (kept[number].pop(0) for _ in range(3))
            return trip, Tokens(x_SM, gates_Sk, experts_Sk, trip.num_rows), dout.wait()

        return arrive

    for number, (trip, tokens, dout_SM) in enumerate(_one_ahead(send, len(tiles))):
        of = (dout_SM, tokens, weights, how.activation, kept[number])
        if _in_blocks(x_NM):
            dx_SM, dgates_Sk = backward_blocks(
                *of, keep=how.keep, products=how.products, in_slabs=in_slabs, sums=sums, needs=needs
            )
        else:
            dx_SM, dgates_Sk = backward_rows(*of, products=how.products, sums=sums, needs=needs)
        kept[number].clear()
        if dx_SM is not None:
            dx_home.expect(number, trip.combine(dx_SM, x_NM.dtype))  # needed on all ranks or on none
        dgates_home.expect(number, trip.combine(dgates_Sk, gates_Nk.dtype))
    return [dx_home.all() if needs.x else None, dgates_home.all(), *sums.results()]


def _sent(trip: Trip, x_nM: Tensor, gates_nk: Tensor) -> Callable[[], tuple[Trip, Tokens]]:
    """Tokens on their way; the result waits for them."""
    x, choices = trip.dispatch(x_nM, x_nM.dtype), trip.dispatch_choices(gates_nk)
    return lambda: (trip, Tokens(x.wait(), *choices.wait(), trip.num_rows))


def _one_ahead(start: Callable[[int], Callable[[], T]], count: int) -> Iterator[T]:
    """What each start comes to; the next one is started before."""
    ahead = start(0)
    for number in range(count):
        here = ahead()
        if number + 1 < count:
            ahead = start(number + 1)
        yield here


class _Home:
    """Where results of all tiles come together, each at the latest when the next one is expected."""

    def __init__(self, tiles: Sequence[slice], num_tokens: int, dtype: torch.dtype) -> None:
        self.tiles, self.num_tokens, self.dtype = tiles, num_tokens, dtype
        self._whole: Tensor | None = None
        self._under_way: tuple[int, Arrival[Tensor]] | None = None

    def expect(self, number: int, arrival: Arrival[Tensor]) -> None:
        """One more tile's are on their way."""
        self._settle()
        self._under_way = number, arrival

    def all(self) -> Tensor:
        """All tiles'."""
        self._settle()
        assert self._whole is not None
        return self._whole

    def _settle(self) -> None:
        if self._under_way is None:
            return
        (number, arrival), self._under_way = self._under_way, None
        values_nX = arrival.wait()
        if len(self.tiles) == 1:
            self._whole = values_nX.to(self.dtype)
            return
        if self._whole is None:
            self._whole = values_nX.new_empty((self.num_tokens, *values_nX.shape[1:]), dtype=self.dtype)
        self._whole[self.tiles[number]] = values_nX


# --- local experts as operators, which torch.compile leaves as they are -------------------------------------

_GIVEN = "Tensor x, Tensor gates, Tensor experts, Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias"
_HOW = "str activation, int tile_tokens, str keep, str products"
_library = torch.library.Library("longctx", "FRAGMENT")
_library.define(f"experts_forward({_GIVEN}, {_HOW}) -> Tensor[]")
_library.define(f"experts_backward(Tensor dout, {_GIVEN}, Tensor[] kept, {_HOW}, bool[] needs) -> Tensor[]")


def _forward_here(x: Tensor, gates: Tensor, experts: Tensor, *rest: Any) -> list[Tensor]:
    weights, how = Weights(*rest[:4]), _How(*rest[4:])
    out, kept, _ = _forward(x, gates, experts, weights, how, LocalDispatcher(), in_slabs=False)
    return [out, *(tensor for of_tile in kept for tensor in of_tile)]


def _backward_here(dout: Tensor, x: Tensor, gates: Tensor, experts: Tensor, *rest: Any) -> list[Tensor]:
    weights, kept, how, needs = Weights(*rest[:4]), rest[4], _How(*rest[5:9]), Needs(*rest[9])
    each = len(kept_widths(how.keep, weights, in_blocks=_in_blocks(x)))
    of_tiles = [list(kept[n * each : (n + 1) * each]) for n, _ in enumerate(tiles_of(len(x), how.tile_tokens))]
    grads = _backward(dout, x, gates, experts, weights, of_tiles, how, needs, LocalDispatcher(), None, in_slabs=False)
    return [x.new_empty(0) if grad is None else grad for grad in grads]


def _fake_forward(x: Tensor, gates: Tensor, experts: Tensor, *rest: Any) -> list[Tensor]:
    weights, how = Weights(*rest[:4]), _How(*rest[4:])
    made = [x.new_empty(x.shape, dtype=accumulate_dtype(x.dtype))]
    for tile in tiles_of(len(x), how.tile_tokens):
        widths = kept_widths(how.keep, weights, in_blocks=_in_blocks(x))
        made += [x.new_empty(experts[tile].numel(), width) for width in widths]
    return made


def _fake_backward(dout: Tensor, x: Tensor, gates: Tensor, experts: Tensor, *rest: Any) -> list[Tensor]:
    weights, needs = rest[:4], rest[9]
    made = [of.new_empty(of.shape if needed else 0) for of, needed in zip((x, gates), needs, strict=False)]
    made[1] = gates.new_empty(gates.shape)
    for weight, needed in zip(weights, needs[2:], strict=True):
        made.append(weight.new_empty(weight.shape) if weight is not None and needed else x.new_empty(0))
    return made


for _name, _call, _fake in (
    ("experts_forward", _forward_here, _fake_forward),
    ("experts_backward", _backward_here, _fake_backward),
):
    _library.impl(_name, _call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"longctx::{_name}", _fake, lib=_library)

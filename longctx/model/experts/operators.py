"""Local experts as operators of ``torch.library``: ``torch.compile`` takes each for one step and does not look inside.

Axes as in ``tiles``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.processor import Products
from longctx.model.experts.call import ExpertsCall, Needs, Weights, saved_widths
from longctx.model.experts.dispatch import ExpertRun, LocalDispatcher, tiles_of
from longctx.model.experts.tiles import Routed, backward_tiles, computes_in_blocks, forward_tiles

_TENSORS = (
    "Tensor x, Tensor gates, Tensor experts, Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias"
)
_OPTIONS = "str activation, int tile_tokens, str recompute, str products"
_library = torch.library.Library("longctx", "FRAGMENT")
_library.define(f"experts_forward({_TENSORS}, {_OPTIONS}) -> Tensor[]")
_library.define(f"experts_backward(Tensor dout, {_TENSORS}, Tensor[] saved, {_OPTIONS}, bool[] needs) -> Tensor[]")


def forward_in_graph(routed: Routed, weights: Weights, call: ExpertsCall) -> tuple[Tensor, list[Tensor]]:
    """``forward_tiles`` as one operator; returns the output, and what all tiles save."""
    out_NM, *saved = torch.ops.longctx.experts_forward.default(
        routed.x_NM,
        routed.gates_Nk,
        routed.experts_Nk,
        weights.gate_up_eFM,
        weights.down_eMF,
        weights.gate_up_bias_eF,
        weights.down_bias_eM,
        call.activation,
        call.run.tile_tokens,
        call.run.recompute,
        call.run.products,
    )
    return out_NM, saved


def backward_in_graph(
    dout_NM: Tensor, routed: Routed, weights: Weights, saved: Sequence[Tensor], call: ExpertsCall, needs: Needs
) -> list[Tensor]:
    """``backward_tiles`` as one operator; an empty tensor where no gradient is needed."""
    return torch.ops.longctx.experts_backward.default(
        dout_NM,
        routed.x_NM,
        routed.gates_Nk,
        routed.experts_Nk,
        weights.gate_up_eFM,
        weights.down_eMF,
        weights.gate_up_bias_eF,
        weights.down_bias_eM,
        saved,
        call.activation,
        call.run.tile_tokens,
        call.run.recompute,
        call.run.products,
        list(needs),
    )


def _call(activation: str, tile_tokens: int, recompute: str, products: Products) -> ExpertsCall:
    """The call that these options describe."""
    # sizes that do not depend on the routing, so that the fake implementations know them
    return ExpertsCall(activation, ExpertRun(LocalDispatcher(), tile_tokens, recompute, products), fixed_sizes=True)


def _forward(
    x: Tensor,
    gates: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    tile_tokens: int,
    recompute: str,
    products: Products,
) -> list[Tensor]:
    weights = Weights(gate_up, down, gate_up_bias, down_bias)
    call = _call(activation, tile_tokens, recompute, products)
    out, saved, _ = forward_tiles(Routed(x, gates, experts), weights, call)
    return [out] + [tensor for of_tile in saved for tensor in of_tile]


def _backward(
    dout: Tensor,
    x: Tensor,
    gates: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    saved: Sequence[Tensor],
    activation: str,
    tile_tokens: int,
    recompute: str,
    products: Products,
    needs: Sequence[bool],
) -> list[Tensor]:
    weights = Weights(gate_up, down, gate_up_bias, down_bias)
    call = _call(activation, tile_tokens, recompute, products)
    # the list of all tiles' tensors back to one list a tile
    num_saved = len(saved_widths(recompute, weights, in_blocks=computes_in_blocks(x)))
    num_tiles = len(tiles_of(len(x), tile_tokens))
    of_tiles = [list(saved[n * num_saved : (n + 1) * num_saved]) for n in range(num_tiles)]
    grads = backward_tiles(dout, Routed(x, gates, experts), weights, of_tiles, None, call, Needs._make(needs))
    # an operator returns tensors only: an empty one stands for none
    made = []
    for grad in grads:
        if grad is None:
            made.append(x.new_empty(0))
        else:
            made.append(grad)
    return made


def _fake_forward(
    x: Tensor,
    gates: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    tile_tokens: int,
    recompute: str,
    products: Products,
) -> list[Tensor]:
    weights = Weights(gate_up, down, gate_up_bias, down_bias)
    widths = saved_widths(recompute, weights, in_blocks=computes_in_blocks(x))
    made = [x.new_empty(x.shape, dtype=accumulate_dtype(x.dtype))]
    for tile in tiles_of(len(x), tile_tokens):
        made += [x.new_empty(experts[tile].numel(), width) for width in widths]
    return made


def _fake_backward(
    dout: Tensor,
    x: Tensor,
    gates: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    saved: Sequence[Tensor],
    activation: str,
    tile_tokens: int,
    recompute: str,
    products: Products,
    needs: Sequence[bool],
) -> list[Tensor]:
    wanted = Needs._make(needs)._replace(gates=True)  # gates' gradients are made in any case
    made = []
    for tensor, is_needed in zip((x, gates, gate_up, down, gate_up_bias, down_bias), wanted, strict=True):
        if tensor is None or not is_needed:
            made.append(x.new_empty(0))
        else:
            made.append(tensor.new_empty(tensor.shape))
    return made


for _name, _operator, _fake in (
    ("experts_forward", _forward, _fake_forward),
    ("experts_backward", _backward, _fake_backward),
):
    _library.impl(_name, _operator, "CompositeExplicitAutograd")
    torch.library.register_fake(f"longctx::{_name}", _fake, lib=_library)

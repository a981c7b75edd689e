"""Local experts as operators of ``torch.library``: ``torch.compile`` takes each for one step and does not look inside.

Axes as in ``tiles``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.processor import Products
from longctx.model.experts.call import ExpertsCall, Needs, Weights, saved_widths
from longctx.model.experts.dispatch import ExpertRun, TokenDispatcher, tiles_of
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
    given = routed + weights + _options_of(call)
    out_NM, *saved = torch.ops.longctx.experts_forward.default(*given)
    return out_NM, saved


def backward_in_graph(
    dout_NM: Tensor, routed: Routed, weights: Weights, saved: Sequence[Tensor], call: ExpertsCall, needs: Needs
) -> list[Tensor]:
    """``backward_tiles`` as one operator; an empty tensor where no gradient is needed."""
    given = (dout_NM,) + routed + weights + (saved,) + _options_of(call) + (list(needs),)  # noqa: RUF005
    return torch.ops.longctx.experts_backward.default(*given)


def _options_of(call: ExpertsCall) -> tuple[str, int, str, Products]:
    return call.activation, call.run.tile_tokens, call.run.recompute, call.run.products


def _call(options: Sequence[Any]) -> ExpertsCall:
    """The call that these options describe."""
    activation, tile_tokens, recompute, products = options
    # sizes that do not depend on the routing, so that the fake implementations know them
    return ExpertsCall(activation, ExpertRun(TokenDispatcher(), tile_tokens, recompute, products), fixed_sizes=True)


# What an operator is given stands in its schema above: three tensors of ``Routed``, four of ``Weights``, four options.


def _forward(*given: Any) -> list[Tensor]:
    out, saved, _ = forward_tiles(Routed._make(given[:3]), Weights._make(given[3:7]), _call(given[7:]))
    return [out] + [tensor for of_tile in saved for tensor in of_tile]


def _backward(dout: Tensor, *given: Any) -> list[Tensor]:
    routed, weights, saved, needs = Routed._make(given[:3]), Weights._make(given[3:7]), given[7], given[12]
    call = _call(given[8:12])
    # the list of all tiles' tensors back to one list a tile
    num_saved = len(saved_widths(call.run.recompute, weights, in_blocks=computes_in_blocks(routed.x_NM)))
    num_tiles = len(tiles_of(len(routed.x_NM), call.run.tile_tokens))
    of_tiles = [list(saved[n * num_saved : (n + 1) * num_saved]) for n in range(num_tiles)]
    grads = backward_tiles(dout, routed, weights, of_tiles, None, call, Needs._make(needs))
    # an operator returns tensors only: an empty one stands for none
    return [dout.new_empty(0) if grad is None else grad for grad in grads]


def _fake_forward(*given: Any) -> list[Tensor]:
    (x, _, experts), weights, call = given[:3], Weights._make(given[3:7]), _call(given[7:])
    widths = saved_widths(call.run.recompute, weights, in_blocks=computes_in_blocks(x))
    made = [x.new_empty(x.shape, dtype=accumulate_dtype(x.dtype))]
    for tile in tiles_of(len(x), call.run.tile_tokens):
        made += [x.new_empty(experts[tile].numel(), width) for width in widths]
    return made


def _fake_backward(dout: Tensor, *given: Any) -> list[Tensor]:
    x = given[0]
    wanted = Needs._make(given[12])._replace(gates=True)  # gates' gradients are made in any case
    made = []
    for tensor, is_needed in zip(given[:2] + given[3:7], wanted, strict=True):
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

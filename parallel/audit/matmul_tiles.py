"""Calls that are too large to send: repeated immediately on the same rank, with a part sent to others.

The rank runs the full call twice and compares all bits, which detects a transient fault. It then cuts a tile out of a
matmul, which every rank computes as a matmul with the tile's own shape, so that bits are comparable again: this detects
a rank that is always wrong. The tile and the step's values at the same positions differ by rounding, since libraries
sum larger matmuls in another order, so these two are compared within a bound.

Axes: n rows and m columns in a tile, K inner dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.kernels.devices import on_cpu
from parallel.audit.bits import BitDifference, difference, matmul_difference
from parallel.audit.call_sample import CallSample, Place
from parallel.audit.repeated_call import flat_copies, tensors_in
from parallel.audit.tensor_copies import Copied, TensorSlot

_REPEATED = 4
"""Limit for the result of a repeated call, as a multiple of a sample's byte limit."""


def sample_of_large(
    func: Any, args: Any, kwargs: Any, result: Any, place: Place, *, rng: Random, limit: int
) -> CallSample | None:
    """Build the sample for a call that has just run; return None if it cannot be audited.

    ``limit`` is the byte limit for a sample.
    """
    call = _repeatable(func, args, kwargs)
    if call is None:
        return None
    own: BitDifference | None = None
    results = list(tensors_in(result))
    is_repeated = sum(x.numel() * x.element_size() for x in results) <= _REPEATED * limit
    if is_repeated:
        own = _difference(results, list(tensors_in(call())))
    # The second result is already freed.
    tile = _cut(func, args, result, rng, limit)
    if tile is None:
        if not is_repeated:
            return None
        return CallSample(op="", args=[], kwargs={}, inputs=[], outputs=[], place=place, own=own, is_alone=True)
    # The copies give the tile the layout that other ranks will have.
    inputs = [Copied.of(tile.rows_nK), Copied.of(tile.columns_Km)]
    computed_nm = torch.mm(inputs[0].laid_out(result.device), inputs[1].laid_out(result.device))
    # On a GPU, intermediate sums may be rounded, depending on its settings, and the bound would not hold.
    if own is None and tile.used_nm is not None and on_cpu(result):
        own = matmul_difference(tile.rows_nK, tile.columns_Km, tile.used_nm, computed_nm)
    n, m = computed_nm.shape
    return CallSample(
        op="aten::mm.default",
        args=[TensorSlot(0), TensorSlot(1)],
        kwargs={},
        inputs=inputs,
        outputs=flat_copies(computed_nm),
        place=place._replace(call=f"{place.call}; a tile [{n}, {m}]"),
        own=own,
        is_tile=True,
    )


class _Tile(NamedTuple):
    rows_nK: Tensor
    columns_Km: Tensor
    used_nm: Tensor | None
    """The step's result; None if that includes more than the matmul."""


def tile_side(terms: int, values: int) -> int:
    """Return the largest s with s·K + K·s + s² ≤ ``values``; K is ``terms``."""
    return math.isqrt(terms * terms + values) - terms


def _repeatable(func: Any, args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """Return a function that repeats the call; None if the call has overwritten its inputs."""
    if func._schema.name == "aten::mm" and func._overloadname == "out":
        return partial(torch.mm, *args)
    if func._schema.is_mutable:
        return None
    return partial(func, *args, **kwargs)


def _cut(func: Any, args: Any, result: Any, rng: Random, limit: int) -> _Tile | None:
    """Cut a tile out of a matmul; return None for other calls, and if one row and one column exceed the limit."""
    name, used = func._schema.name, result
    if name == "aten::addmm":
        args, used = args[1:], None
    elif name not in ("aten::mm", "aten::bmm"):
        return None
    # A third argument requests another output dtype.
    if len(args) != 2:
        return None
    a, b = args
    if name == "aten::bmm":
        batch = rng.randrange(len(a))
        a, b, used = a[batch], b[batch], result[batch]
    # A square tile covers the most result values per byte sent.
    side = tile_side(a.shape[1], limit // a.element_size())
    if side < 1:
        return None
    rows, columns = _range(a.shape[0], side, rng), _range(b.shape[1], side, rng)
    if used is not None:
        used = used[rows, columns]
    return _Tile(a[rows], b[:, columns], used)


def _range(size: int, most: int, rng: Random) -> slice:
    count = min(size, most)
    start = rng.randrange(size - count + 1)
    return slice(start, start + count)


def _difference(used: list[Tensor], again: list[Tensor]) -> BitDifference | None:
    """Compare results, without copying equal ones."""
    # torch.equal is False for NaN: then compare bits.
    if all(torch.equal(a, b) for a, b in zip(used, again, strict=True)):
        return None
    return difference(flat_copies(used), flat_copies(again))

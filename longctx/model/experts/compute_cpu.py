"""Experts on a CPU: a block of one expert's rows at a time, in memory that every block uses again.

It stays in the cache, where tensors of all rows would be fetched from new pages again and again. A row is a token at
one of its experts.

Axes: S tokens here, k choices a token, R rows in the order of their experts, n rows of a block, M model width, F FFN
width of one expert (gate and up together: 2F), e experts here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.grouped import sort_by_expert
from longctx.kernels.matmul import multiplies_in_float32
from longctx.kernels.memory import fresh, mapped
from longctx.kernels.processor import Products
from longctx.model.experts.parts import Needs, Tokens, Weights, WeightSums, kept_widths
from longctx.model.layers.activations import gated, gated_backward

BLOCK_ROWS = 1024
"""Most rows of a block: enough for products at full speed, few enough for the cache."""
SLAB_BYTES = 8 << 20
"""Least of what is kept that backward lets go of at a time."""


class _Blocks:
    """A tile's rows in blocks, in the dtype that products are formed in, and memory for one block."""

    def __init__(self, tokens: Tokens, weights: Weights, products: Products) -> None:
        order_R, _, ends_e = sort_by_expert(tokens.experts_Sk, len(weights.down_eMF))
        ends = ends_e.tolist()
        self.order_R = order_R[: ends[-1]]
        self.token_R = self.order_R // tokens.experts_Sk.shape[1]
        self.gates_R1 = tokens.gates_Sk.flatten().index_select(0, self.order_R).unsqueeze(-1)
        self.dtype = torch.float32 if multiplies_in_float32(tokens.x_SM, products) else tokens.x_SM.dtype
        self._blocks = list(_cut(ends))
        self._most = max((rows.stop - rows.start for _, rows in self._blocks), default=0)
        self._memory: dict[str, Tensor] = {}
        self._wide: dict[str, tuple[int, Tensor]] = {}

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """(expert, its next rows)."""
        return iter(self._blocks)

    @property
    def num_rows(self) -> int:
        """Rows of all blocks."""
        return len(self.order_R)

    def starts(self, row_bytes: int) -> list[int]:
        """First rows of slabs: blocks that follow one another, in each ``SLAB_BYTES`` or a little more."""
        starts = [0]
        for _, rows in self._blocks:
            if (rows.start - starts[-1]) * row_bytes >= SLAB_BYTES:
                starts.append(rows.start)
        return starts

    def room(self, name: str, rows: slice, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory [n, width] for these rows; what was in it under this name is gone."""
        if name not in self._memory:
            self._memory[name] = fresh((self._most, width), dtype=dtype or self.dtype)
        return self._memory[name][: rows.stop - rows.start]

    def take(self, name: str, source_SX: Tensor, rows: slice) -> Tensor:
        """The tokens of these rows."""
        width = source_SX.shape[1]
        is_narrow = source_SX.dtype != self.dtype
        raw = self.room(f"{name} as it is" if is_narrow else name, rows, width, source_SX.dtype)
        torch.index_select(source_SX, 0, self.token_R[rows], out=raw)
        return self.room(name, rows, width).copy_(raw) if is_narrow else raw

    def weight(self, name: str, of_experts: Tensor, expert: int) -> Tensor:
        """An expert's weight; blocks of an expert follow one another, so that it is converted once."""
        own = of_experts[expert]
        if own.dtype == self.dtype:
            return own
        known, wide = self._wide.get(name, (-1, None))
        if wide is None:
            wide = fresh(own.shape, dtype=self.dtype)
        if known != expert:
            self._wide[name] = expert, wide.copy_(own)
        return wide

    def add_to_tokens(self, out_SM: Tensor, y_nM: Tensor, rows: slice) -> None:
        """Add each row to its token's; an expert has a token once, so the order of additions is that of the experts."""
        out_SM.index_add_(0, self.token_R[rows], y_nM.to(out_SM.dtype))


def _cut(ends: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Every expert's rows in equal blocks."""
    start = 0
    for expert, stop in enumerate(ends):
        count = -(-(stop - start) // BLOCK_ROWS)
        for n in range(count):
            yield expert, slice(start + (stop - start) * n // count, start + (stop - start) * (n + 1) // count)
        start = stop


class _Kept:
    """What forward keeps of its rows, in slabs of whole blocks: backward lets go of each once it is past it.

    ``tensors`` are the first slab's (gate and up, then x, as ``keep`` asks for them), then the next one's. One slab of
    ``most_rows`` holds all where a compiler wants to know sizes beforehand.
    """

    def __init__(self, blocks: _Blocks, keep: str, weights: Weights, dtype: torch.dtype, most_rows: int | None) -> None:
        self.dtype, self.widths = dtype, kept_widths(keep, weights, in_blocks=True)
        self.starts = [0] if most_rows is not None else blocks.starts(sum(self.widths) * dtype.itemsize)
        self.stops = [*self.starts[1:], blocks.num_rows if most_rows is None else most_rows]

    def allocate(self) -> list[Tensor]:
        """Memory of all slabs, of which pages are had when first written."""
        sizes = [stop - start for start, stop in zip(self.starts, self.stops, strict=True)]
        return [mapped((size, width), dtype=self.dtype) for size in sizes for width in self.widths]

    def of(self, tensors: Sequence[Tensor], rows: slice) -> list[Tensor]:
        """A block's rows of what is kept."""
        slab, each = bisect_right(self.starts, rows.start) - 1, len(self.widths)
        first = self.starts[slab]
        return [whole[rows.start - first : rows.stop - first] for whole in tensors[slab * each : (slab + 1) * each]]

    def let_go(self, tensors: list[Tensor], rows: slice) -> None:
        """Drop the slabs before this block's."""
        for place in range((bisect_right(self.starts, rows.start) - 1) * len(self.widths)):
            tensors[place] = _NOTHING


_NOTHING = torch.empty(0)


def forward_blocks(
    tokens: Tokens, weights: Weights, kind: str, *, keep: str, products: Products, in_slabs: bool
) -> tuple[Tensor, list[Tensor]]:
    """Σ over a token's experts here of gate · expert(x), [S, M] in float32 (float64), and what ``keep`` keeps.

    ``keep`` is one of ``dispatch.RECOMPUTE``.
    """
    x_SM = tokens.x_SM
    blocks, (_, M, F) = _Blocks(tokens, weights, products), weights.down_eMF.shape
    out_SM = mapped(x_SM.shape, dtype=accumulate_dtype(x_SM.dtype))
    slabs = _Kept(blocks, keep, weights, x_SM.dtype, None if in_slabs else tokens.experts_Sk.numel())
    tensors = slabs.allocate()
    for expert, rows in blocks:
        x_nM, kept = blocks.take("x", x_SM, rows), slabs.of(tensors, rows)
        gate_up_nF = _gate_up(blocks, x_nM, weights, expert, rows, kept)
        inner_nF = _activate(kind, gate_up_nF, blocks.gates_R1[rows], into=blocks.room("inner", rows, F))
        y_nM = blocks.room("y", rows, M)
        torch.mm(inner_nF, blocks.weight("down", weights.down_eMF, expert).T, out=y_nM)
        if weights.down_bias_eM is not None:
            y_nM += blocks.gates_R1[rows] * weights.down_bias_eM[expert]
        blocks.add_to_tokens(out_SM, y_nM, rows)
        for place in kept[1:]:
            place.copy_(x_nM)
    return out_SM, tensors


def _gate_up(
    blocks: _Blocks, x_nM: Tensor, weights: Weights, expert: int, rows: slice, kept: Sequence[Tensor] = ()
) -> Tensor:
    """Gate and up before the activation, [n, 2F], also in what is kept of them."""
    is_direct = bool(kept) and kept[0].dtype == blocks.dtype
    out_nF = kept[0] if is_direct else blocks.room("gate and up", rows, weights.gate_up_eFM.shape[1])
    torch.mm(x_nM, blocks.weight("gate_up", weights.gate_up_eFM, expert).T, out=out_nF)
    if weights.gate_up_bias_eF is not None:
        out_nF += weights.gate_up_bias_eF[expert]
    if kept and not is_direct:
        kept[0].copy_(out_nF)
    return out_nF


def _gate_up_again(
    blocks: _Blocks, tokens: Tokens, weights: Weights, expert: int, rows: slice, kept: Sequence[Tensor]
) -> Tensor:
    """Gate and up as they were kept, or would have been: rounded to x's dtype, so that keeping changes no bit."""
    width, dtype = weights.gate_up_eFM.shape[1], tokens.x_SM.dtype
    if kept and dtype == blocks.dtype:
        return kept[0]
    if kept:
        return blocks.room("gate and up", rows, width).copy_(kept[0])
    wide = _gate_up(blocks, blocks.take("x", tokens.x_SM, rows), weights, expert, rows)
    return wide if dtype == blocks.dtype else wide.copy_(blocks.room("rounded", rows, width, dtype).copy_(wide))


def backward_blocks(
    dout_SM: Tensor,
    tokens: Tokens,
    weights: Weights,
    kind: str,
    tensors: list[Tensor],
    *,
    keep: str,
    products: Products,
    in_slabs: bool,
    sums: WeightSums,
    needs: Needs,
) -> tuple[Tensor | None, Tensor]:
    """Gradients for x, [S, M] in float32 (float64), and gates [S, k]; those of the weights are added to ``sums``.

    ``tensors`` are what ``forward_blocks`` kept in the same way, and are gone one after the other.
    """
    x_SM = tokens.x_SM
    blocks, (_, M, F) = _Blocks(tokens, weights, products), weights.down_eMF.shape
    slabs = _Kept(blocks, keep, weights, x_SM.dtype, None if in_slabs else tokens.experts_Sk.numel())
    dx_SM = mapped(x_SM.shape, dtype=accumulate_dtype(x_SM.dtype)) if needs.x else None
    dgates_R = torch.empty(blocks.num_rows, dtype=tokens.gates_Sk.dtype)
    for expert, rows in blocks:
        slabs.let_go(tensors, rows)
        kept = slabs.of(tensors, rows)
        gate_up_nF = _gate_up_again(blocks, tokens, weights, expert, rows, kept)
        dy_nM = blocks.take("dy", dout_SM, rows)
        dinner_nF, gates_n1 = blocks.room("dinner", rows, F), blocks.gates_R1[rows]
        torch.mm(dy_nM, blocks.weight("down", weights.down_eMF, expert), out=dinner_nF)
        inner_nF, dgate_up_nF = blocks.room("inner", rows, F), blocks.room("dgate and dup", rows, 2 * F)
        dgates_R[rows] = _activate_backward(kind, dinner_nF, gate_up_nF, gates_n1, inner=inner_nF, into=dgate_up_nF)
        if sums.down is not None:
            sums.down.add_outer(expert, dy_nM, inner_nF)
        if weights.down_bias_eM is not None:
            dgates_R[rows] += (dy_nM * weights.down_bias_eM[expert]).sum(-1)
        if sums.down_bias is not None:
            sums.down_bias.add_rows(expert, dy_nM * gates_n1)
        if sums.gate_up_bias is not None:
            sums.gate_up_bias.add_rows(expert, dgate_up_nF)
        if sums.gate_up is not None:
            sums.gate_up.add_outer(expert, dgate_up_nF, _x_again(blocks, x_SM, rows, kept))
        if dx_SM is not None:
            dx_nM = blocks.room("dx", rows, M)
            torch.mm(dgate_up_nF, blocks.weight("gate_up", weights.gate_up_eFM, expert), out=dx_nM)
            blocks.add_to_tokens(dx_SM, dx_nM, rows)
    dgates_Sk = torch.zeros_like(tokens.gates_Sk, memory_format=torch.contiguous_format)
    dgates_Sk.view(-1)[blocks.order_R] = dgates_R
    return dx_SM, dgates_Sk


def _x_again(blocks: _Blocks, x_SM: Tensor, rows: slice, kept: Sequence[Tensor]) -> Tensor:
    if len(kept) < 2:
        return blocks.take("x", x_SM, rows)
    own = kept[1]
    return own if own.dtype == blocks.dtype else blocks.room("x", rows, own.shape[1]).copy_(own)


def _activate(kind: str, gate_up_nF: Tensor, gates_n1: Tensor, *, into: Tensor) -> Tensor:
    """gate · activation, in ``into``."""
    gate_nF, up_nF = gate_up_nF.chunk(2, dim=-1)
    if kind == "swiglu":
        torch.ops.aten.silu.out(gate_nF, out=into).mul_(up_nF)
    else:
        into.copy_(gated(kind, gate_nF, up_nF))
    return into.mul_(gates_n1)


def _activate_backward(
    kind: str, dinner_nF: Tensor, gate_up_nF: Tensor, gates_n1: Tensor, *, inner: Tensor, into: Tensor
) -> Tensor:
    """The gates' gradients [n]; gate · activation in ``inner``, gate's and up's gradients in ``into``.

    What is in ``dinner`` is gone.
    """
    gate_nF, up_nF = gate_up_nF.chunk(2, dim=-1)
    dgate_nF, dup_nF = into.chunk(2, dim=-1)
    partial = accumulate_dtype(dinner_nF.dtype)
    if kind != "swiglu":
        torch.mul(gated(kind, gate_nF, up_nF), gates_n1, out=inner)
        dgate, dup, dgates = gated_backward(kind, dinner_nF, gate_nF, up_nF, gates_n1.squeeze(-1))
        assert dgates is not None
        dgate_nF.copy_(dgate)
        dup_nF.copy_(dup)
        return dgates
    torch.ops.aten.silu.out(gate_nF, out=dup_nF)
    torch.mul(dup_nF, up_nF, out=inner)
    dgates_n = (
        torch.linalg.vecdot(dinner_nF, inner)
        if dinner_nF.dtype == partial
        else (dinner_nF * inner).sum(-1, dtype=partial)
    )
    inner.mul_(gates_n1)
    dinner_nF.mul_(gates_n1)
    dup_nF.mul_(dinner_nF)
    dinner_nF.mul_(up_nF)
    torch.ops.aten.silu_backward.grad_input(dinner_nF, gate_nF, grad_input=dgate_nF)
    return dgates_n

"""Experts on a CPU: one block of an expert's assignments at a time, in buffers that every block uses again.

The buffers stay in the cache. Tensors of all assignments would be fetched from new pages again and again.

Axes: S tokens that arrived, k experts a token, R assignments in the order of their experts, n assignments of a block,
M model width, F FFN width of one expert (gate and up together: 2F), e experts of this process.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.grouped import sort_by_expert
from longctx.kernels.matmul import multiplies_in_float32
from longctx.kernels.processor import Products
from longctx.model.experts.call import ExpertsCall, Needs, Tokens, Weights, saved_widths
from longctx.model.experts.gradient_sum import WeightGradients
from longctx.model.layers.activations import gated, gated_backward

BLOCK_TOKENS = 1024
"""Most assignments of a block: enough for products at full speed, few enough for the cache."""
CHUNK_BYTES = 8 << 20
"""Least size of what backward frees at a time."""
_FREED = torch.empty(0)


def forward_blocks(tokens: Tokens, weights: Weights, call: ExpertsCall) -> tuple[Tensor, list[Tensor]]:
    """Compute Σ over a token's experts here of gate · expert(x).

    Returns the sums [S, M] in float32 (float64 for float64), and what ``call.run.recompute`` saves for backward.
    """
    x_SM = tokens.x_SM
    M, F = weights.down_eMF.shape[1:]
    if len(x_SM) == 1 and not saved_widths(call.run.recompute, weights, in_blocks=True):
        return _forward_token(tokens, weights, call), []
    blocks = _Blocks(tokens, weights, call.run.products)
    chunks = _SavedChunks(blocks, tokens, weights, call)
    saved = chunks.allocate()
    out_SM = torch.zeros(x_SM.shape, dtype=accumulate_dtype(x_SM.dtype))
    for expert, block in blocks:
        # the first product, whose result backward begins with
        of_block = chunks.of(saved, block)
        x_nM = blocks.gather("x", x_SM, block)
        if len(of_block) == 2:
            of_block[1].copy_(x_nM)
        gate_up_nF = _gate_up(blocks, x_nM, weights, expert, block, of_block)

        # the gate of the token enters before the second product, where it costs F factors a token and not M
        inner_nF = blocks.buffer("inner", block, F)
        _activate(call.activation, gate_up_nF, blocks.gates_R1[block], into=inner_nF)
        y_nM = blocks.buffer("y", block, M)
        torch.mm(inner_nF, blocks.weight("down", weights.down_eMF, expert).T, out=y_nM)
        if weights.down_bias_eM is not None:
            y_nM += blocks.gates_R1[block] * weights.down_bias_eM[expert]
        blocks.add_to_tokens(out_SM, y_nM, block)
    return out_SM, saved


def backward_blocks(
    dout_SM: Tensor,
    tokens: Tokens,
    weights: Weights,
    saved: list[Tensor],
    call: ExpertsCall,
    *,
    gradients: WeightGradients,
    needs: Needs,
) -> tuple[Tensor | None, Tensor]:
    """Compute the gradients of x [S, M], in float32 (float64 for float64), and of the gates [S, k].

    Those of the weights are added to ``gradients``. ``saved`` is what ``forward_blocks`` saved; it is freed on the way.
    """
    x_SM = tokens.x_SM
    M, F = weights.down_eMF.shape[1:]
    blocks = _Blocks(tokens, weights, call.run.products)
    chunks = _SavedChunks(blocks, tokens, weights, call)
    dx_SM: Tensor | None = None
    if needs.x:
        dx_SM = torch.zeros(x_SM.shape, dtype=accumulate_dtype(x_SM.dtype))
    dgates_R = torch.empty(len(blocks.order_R), dtype=tokens.gates_Sk.dtype)
    for expert, block in blocks:
        # what earlier blocks saved is freed for the weights' gradients
        chunks.free_before(saved, block)
        of_block = chunks.of(saved, block)
        gates_n1 = blocks.gates_R1[block]
        gate_up_nF = _saved_gate_up(blocks, tokens, weights, expert, block, of_block)

        # through the second product and the activation
        dy_nM = blocks.gather("dy", dout_SM, block)
        dinner_nF = blocks.buffer("dinner", block, F)
        torch.mm(dy_nM, blocks.weight("down", weights.down_eMF, expert), out=dinner_nF)
        inner_nF, dgate_up_nF = blocks.buffer("inner", block, F), blocks.buffer("dgate and dup", block, 2 * F)
        dgates_R[block] = _activate_backward(
            call.activation, dinner_nF, gate_up_nF, gates_n1, inner=inner_nF, into=dgate_up_nF
        )
        if weights.down_bias_eM is not None:
            dgates_R[block] += (dy_nM * weights.down_bias_eM[expert]).sum(-1)

        # the weights, while their inputs are in the cache
        if gradients.down is not None:
            gradients.down.add_outer(expert, dy_nM, inner_nF)
        if gradients.down_bias is not None:
            gradients.down_bias.add_bias(expert, dy_nM * gates_n1)
        if gradients.gate_up_bias is not None:
            gradients.gate_up_bias.add_bias(expert, dgate_up_nF)
        if gradients.gate_up is not None:
            gradients.gate_up.add_outer(expert, dgate_up_nF, _saved_x(blocks, x_SM, block, of_block))

        # through the first product
        if dx_SM is not None:
            dx_nM = blocks.buffer("dx", block, M)
            torch.mm(dgate_up_nF, blocks.weight("gate_up", weights.gate_up_eFM, expert), out=dx_nM)
            blocks.add_to_tokens(dx_SM, dx_nM, block)
    # from the order of the experts to that of the tokens; exactly 0 where a gate has no expert here
    dgates_Sk = torch.zeros_like(tokens.gates_Sk, memory_format=torch.contiguous_format)
    dgates_Sk.view(-1)[blocks.order_R] = dgates_R
    return dx_SM, dgates_Sk


def _forward_token(tokens: Tokens, weights: Weights, call: ExpertsCall) -> Tensor:
    """``forward_blocks`` of a single token, as in decoding: its experts' weights are read once, and as they are."""
    x_M, wide = tokens.x_SM[0], accumulate_dtype(tokens.x_SM.dtype)
    chosen = [(choice, expert) for choice, expert in enumerate(tokens.experts_Sk[0].tolist()) if expert >= 0]
    gates_R1 = tokens.gates_Sk[0, [choice for choice, _ in chosen]].unsqueeze(-1)
    expert_R = [expert for _, expert in chosen]

    gate_up_RF = x_M.new_empty(len(chosen), weights.gate_up_eFM.shape[1])
    for row, expert in enumerate(expert_R):
        torch.mv(weights.gate_up_eFM[expert], x_M, out=gate_up_RF[row])
    if weights.gate_up_bias_eF is not None:
        gate_up_RF += weights.gate_up_bias_eF[expert_R]
    inner_RF = x_M.new_empty(len(chosen), weights.down_eMF.shape[2])
    _activate(call.activation, gate_up_RF, gates_R1, into=inner_RF)

    y_RM = x_M.new_empty(len(chosen), len(x_M))
    for row, expert in enumerate(expert_R):
        torch.mv(weights.down_eMF[expert], inner_RF[row], out=y_RM[row])
    if weights.down_bias_eM is not None:
        y_RM += gates_R1 * weights.down_bias_eM[expert_R]
    return y_RM.sum(0, keepdim=True, dtype=wide)


class _Blocks:
    """A tile's assignments in blocks of one expert each, and buffers of one block."""

    def __init__(self, tokens: Tokens, weights: Weights, products: Products) -> None:
        order_R, _, ends_e = sort_by_expert(tokens.experts_Sk, len(weights.down_eMF))
        ends = ends_e.tolist()
        self.order_R = order_R[: ends[-1]]  # what has no expert here comes last
        self.token_R = self.order_R // tokens.experts_Sk.shape[1]
        self.gates_R1 = tokens.gates_Sk.flatten().index_select(0, self.order_R).unsqueeze(-1)
        self.dtype = tokens.x_SM.dtype
        """In which products are formed."""
        if multiplies_in_float32(tokens.x_SM, products):
            self.dtype = torch.float32
        self._blocks = list(_cut(ends))
        self._most = max((block.stop - block.start for _, block in self._blocks), default=0)
        self._buffers: dict[str, Tensor] = {}
        self._converted: dict[str, tuple[int, Tensor]] = {}

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """Expert after expert, its blocks: (expert, range of assignments)."""
        return iter(self._blocks)

    def buffer(self, name: str, block: slice, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer [n, width] for a block. It overwrites what the last block had under this name."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self._most, width, dtype=dtype or self.dtype)
        return self._buffers[name][: block.stop - block.start]

    def gather(self, name: str, source_SX: Tensor, block: slice) -> Tensor:
        """The block's tokens, in the dtype of the products."""
        width = source_SX.shape[1]
        if source_SX.dtype == self.dtype:
            tokens_nX = self.buffer(name, block, width)
            return torch.index_select(source_SX, 0, self.token_R[block], out=tokens_nX)
        # gathered first and converted then: to convert all tokens would need a tensor of them in float32
        narrow_nX = self.buffer(f"narrow {name}", block, width, source_SX.dtype)
        torch.index_select(source_SX, 0, self.token_R[block], out=narrow_nX)
        return self.buffer(name, block, width).copy_(narrow_nX)

    def weight(self, name: str, of_experts: Tensor, expert: int) -> Tensor:
        """An expert's weight in the dtype of the products."""
        own = of_experts[expert]
        if own.dtype == self.dtype:
            return own
        # blocks of an expert follow one another, so that it is converted once
        known, converted = self._converted.get(name, (-1, None))
        if converted is None:
            converted = torch.empty(own.shape, dtype=self.dtype)
        if known != expert:
            self._converted[name] = expert, converted.copy_(own)
        return converted

    def add_to_tokens(self, out_SM: Tensor, y_nM: Tensor, block: slice) -> None:
        """Add the block's results to their tokens'."""
        # an expert has a token once, so additions happen in the order of the experts
        out_SM.index_add_(0, self.token_R[block], y_nM.to(out_SM.dtype))


def _cut(ends: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Cut every expert's assignments into equal blocks."""
    start = 0
    for expert, stop in enumerate(ends):
        size = stop - start
        count = -(-size // BLOCK_TOKENS)
        for n in range(count):
            yield expert, slice(start + size * n // count, start + size * (n + 1) // count)
        start = stop


class _SavedChunks:
    """What forward saves of its assignments, in chunks of whole blocks; backward frees each once it is past it.

    The gradients of the weights take its memory: without chunks a layer of 16 experts needs 0.71 to 0.78 of
    transformers' memory in float32, with them 0.41 to 0.69 (``python -m benchmarks.moe``).

    Tensors come in this order: gate and up of the first chunk, its x where x is saved, then those of the next chunk.
    """

    def __init__(self, blocks: _Blocks, tokens: Tokens, weights: Weights, call: ExpertsCall) -> None:
        self.dtype = tokens.x_SM.dtype
        self.widths = saved_widths(call.run.recompute, weights, in_blocks=True)
        if call.fixed_sizes:
            # one chunk for as many assignments as the tokens could have: a graph's sizes know nothing of the routing
            self.starts, num_saved = [0], tokens.experts_Sk.numel()
        else:
            self.starts, num_saved = self._cut(blocks), len(blocks.order_R)
        self.stops = self.starts[1:]
        self.stops.append(num_saved)

    def _cut(self, blocks: _Blocks) -> list[int]:
        """First assignments of chunks that have ``CHUNK_BYTES`` or a little more."""
        token_bytes = sum(self.widths) * self.dtype.itemsize
        starts = [0]
        for _, block in blocks:
            if (block.start - starts[-1]) * token_bytes >= CHUNK_BYTES:
                starts.append(block.start)
        return starts

    def allocate(self) -> list[Tensor]:
        """Memory for all chunks, none of which is touched yet."""
        sizes = [stop - start for start, stop in zip(self.starts, self.stops, strict=True)]
        return [_own_pages(size, width, self.dtype) for size in sizes for width in self.widths]

    def of(self, saved: Sequence[Tensor], block: slice) -> list[Tensor]:
        """The block's part of what is saved."""
        chunk, first = self._chunk_of(block)
        own = slice(block.start - self.starts[chunk], block.stop - self.starts[chunk])
        return [tensor[own] for tensor in saved[first : first + len(self.widths)]]

    def free_before(self, saved: list[Tensor], block: slice) -> None:
        """Free the chunks before the block's."""
        _, first = self._chunk_of(block)
        for number in range(first):
            saved[number] = _FREED

    def _chunk_of(self, block: slice) -> tuple[int, int]:
        """The block's chunk, and where its tensors begin in the list."""
        chunk = bisect_right(self.starts, block.start) - 1
        return chunk, chunk * len(self.widths)


def _own_pages(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor whose memory is the system's again once it is freed.

    An allocator may keep what it is given back for tensors of the same size, so that gradients could not take it.
    """
    nbytes = rows * width * dtype.itemsize
    if nbytes < mmap.PAGESIZE:
        return torch.empty(rows, width, dtype=dtype)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(rows, width)


def _gate_up(
    blocks: _Blocks, x_nM: Tensor, weights: Weights, expert: int, block: slice, of_block: Sequence[Tensor] = ()
) -> Tensor:
    """Gate and up before the activation, [n, 2F]; also written to what is saved of the block."""
    saved_nF: Tensor | None = None
    if of_block:
        saved_nF = of_block[0]
    if saved_nF is not None and saved_nF.dtype == blocks.dtype:
        out_nF = saved_nF  # computed in place
    else:
        out_nF = blocks.buffer("gate and up", block, weights.gate_up_eFM.shape[1])
    torch.mm(x_nM, blocks.weight("gate_up", weights.gate_up_eFM, expert).T, out=out_nF)
    if weights.gate_up_bias_eF is not None:
        out_nF += weights.gate_up_bias_eF[expert]
    if saved_nF is not None and saved_nF is not out_nF:
        saved_nF.copy_(out_nF)
    return out_nF


def _saved_gate_up(
    blocks: _Blocks, tokens: Tokens, weights: Weights, expert: int, block: slice, of_block: Sequence[Tensor]
) -> Tensor:
    """Gate and up as they were saved, or recomputed to the same bits."""
    width, dtype = weights.gate_up_eFM.shape[1], tokens.x_SM.dtype
    if of_block and dtype == blocks.dtype:
        return of_block[0]
    if of_block:
        return blocks.buffer("gate and up", block, width).copy_(of_block[0])
    out_nF = _gate_up(blocks, blocks.gather("x", tokens.x_SM, block), weights, expert, block)
    if dtype == blocks.dtype:
        return out_nF
    # rounded to x's dtype as saving does, so that recomputation changes no bit
    rounded_nF = blocks.buffer("rounded", block, width, dtype).copy_(out_nF)
    return out_nF.copy_(rounded_nF)


def _saved_x(blocks: _Blocks, x_SM: Tensor, block: slice, of_block: Sequence[Tensor]) -> Tensor:
    """The block's tokens as they were saved, or gathered again."""
    if len(of_block) < 2:
        return blocks.gather("x", x_SM, block)
    saved_nM = of_block[1]
    if saved_nM.dtype == blocks.dtype:
        return saved_nM
    return blocks.buffer("x", block, saved_nM.shape[1]).copy_(saved_nM)


def _activate(activation: str, gate_up_nF: Tensor, gates_n1: Tensor, *, into: Tensor) -> None:
    """Write activation · gate of the token to ``into``."""
    gate_nF, up_nF = gate_up_nF.chunk(2, dim=-1)
    if activation == "swiglu":
        torch.ops.aten.silu.out(gate_nF, out=into).mul_(up_nF)
    else:
        into.copy_(gated(activation, gate_nF, up_nF))
    into.mul_(gates_n1)


def _activate_backward(
    activation: str, dinner_nF: Tensor, gate_up_nF: Tensor, gates_n1: Tensor, *, inner: Tensor, into: Tensor
) -> Tensor:
    """Return the gates' gradients [n]; write gate's and up's gradients to ``into``.

    ``inner`` receives what ``_activate`` made; ``dinner`` is overwritten.
    """
    if activation == "swiglu":
        return _swiglu_backward(dinner_nF, gate_up_nF, gates_n1, inner=inner, into=into)
    gate_nF, up_nF = gate_up_nF.chunk(2, dim=-1)
    dgate_nF, dup_nF = into.chunk(2, dim=-1)
    torch.mul(gated(activation, gate_nF, up_nF), gates_n1, out=inner)
    dgate, dup, dgates_n = gated_backward(activation, dinner_nF, gate_nF, up_nF, gates_n1.squeeze(-1))
    assert dgates_n is not None
    dgate_nF.copy_(dgate)
    dup_nF.copy_(dup)
    return dgates_n


def _swiglu_backward(dinner_nF: Tensor, gate_up_nF: Tensor, gates_n1: Tensor, *, inner: Tensor, into: Tensor) -> Tensor:
    """``_activate_backward`` of silu(gate) · up without a tensor of its own: every result has its buffer."""
    gate_nF, up_nF = gate_up_nF.chunk(2, dim=-1)
    dgate_nF, dup_nF = into.chunk(2, dim=-1)
    # silu(gate), which is up's gradient but for the factors below
    torch.ops.aten.silu.out(gate_nF, out=dup_nF)
    torch.mul(dup_nF, up_nF, out=inner)
    # the gate's gradient is taken before the gate enters; a sum of F terms, in float32 at least
    sum_dtype = accumulate_dtype(dinner_nF.dtype)
    if dinner_nF.dtype == sum_dtype:
        dgates_n = torch.linalg.vecdot(dinner_nF, inner)
    else:
        dgates_n = (dinner_nF * inner).sum(-1, dtype=sum_dtype)
    inner.mul_(gates_n1)
    dinner_nF.mul_(gates_n1)
    # dinner serves up first, then becomes the gradient of silu(gate)
    dup_nF.mul_(dinner_nF)
    dinner_nF.mul_(up_nF)
    torch.ops.aten.silu_backward.grad_input(dinner_nF, gate_nF, grad_input=dgate_nF)
    return dgates_n

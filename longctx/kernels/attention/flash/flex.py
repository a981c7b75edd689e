"""PyTorch's FlexAttention behind our kernel interface: soft cap, ALiBi and learned biases on CUDA.

Written for ``torch.nn.attention.flex_attention`` in PyTorch 2.11 to 2.13 (``return_aux``). It compiles on each new
combination of score rule, dtype and head size, which takes seconds to a minute, and again when row and key counts first
change; other documents and later changes do not recompile.

It runs the same calls as the flash kernels, over packed rows whose visible keys form one range each, and so needs
neither a window nor documents: a query row sees keys ``first <= k < stop``.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from longctx.kernels.attention.bias import buckets
from longctx.kernels.attention.flash.calls import UNBOUNDED, VarlenCall
from longctx.kernels.attention.flash.varlen import HALF, ThreeTensors, VarlenKernel
from longctx.kernels.attention.kernel_interface import KernelRequest, ScoreRules

_BLOCK = 128
"""Rows and keys per mask block."""
_LEAST_HEAD = 16
"""Minimum head size for its matmuls."""
_LEAST_ROWS = _BLOCK + 1
"""Minimum query rows and key rows per call. PyTorch specializes size 1, so every mask has at least two blocks per side.
"""
_CACHE_BYTES = 256 << 20
"""Memory limit for cached masks. The largest take 16 bytes per 128 × 128 block."""


class FlexKernel(VarlenKernel):
    """Kernel for any mask and any score rule; bfloat16, float16 and float32."""

    def __init__(self, ops: Any = None, *, capability: tuple[int, int] | None = None) -> None:
        """Create the kernel; ``ops`` is the function to call (None: ``flex_attention``, compiled)."""
        super().__init__("flex", capability=capability)
        self.ops = ops
        self._prepared = PreparedCalls(_CACHE_BYTES)

    def supports(self, request: KernelRequest) -> str | None:
        largest = 256
        if request.dtype == torch.float32:
            largest = 128  # shared memory capacity per thread block
        if why := self.request_unsupported_reason(request, dtypes=(*HALF, torch.float32), largest_head=largest):
            return why
        if request.deterministic and "relative_bias" in request.rules:
            return "the bias table's gradient is summed in a varying order"
        return self.device_unsupported_reason(request, (8, None))

    def head_sizes(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        return max(_LEAST_HEAD, head_dim), max(_LEAST_HEAD, value_dim)

    def call_forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKV: Tensor, call: VarlenCall, scores: ScoreRules
    ) -> tuple[Tensor, Tensor]:
        return self._attention(q_nHD.detach(), k_mKD.detach(), v_mKV.detach(), call, scores, _table(scores))

    def call_backward(
        self, dout_nHV: Tensor, qkv: ThreeTensors, result: tuple[Tensor, Tensor], call: VarlenCall, scores: ScoreRules
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        table, (out_nHV, lse_nH) = _table(scores), result
        # FlexAttention's backward only knows its own log-sum-exp, over this call's keys, not the global one. Let o, l
        # be its output and log-sum-exp, O, L the global ones, p = exp(s − l) its weights and w = exp(l − L) <= 1; the
        # global weights are w·p. Given output gradient w·dO and log-sum-exp gradient w·(dO·o − dO·O), it computes the
        # desired score gradient w·p·(dO·v − dO·O). That needs o and l, so backward reruns the forward: 3.5 instead of
        # 2.5 times the forward's work, and exact.
        q, k, v = leaves = [x.detach().requires_grad_() for x in qkv]
        if table is not None:
            table = table.detach().requires_grad_()
            leaves.append(table)
        # This call's own o and l, which FlexAttention's backward uses.
        with torch.enable_grad():
            own_out, own_lse = self._attention(q, k, v, call, scores, table)
        # w = exp(l − L), this call's share in the global softmax
        share_nH1 = torch.exp(own_lse.detach().double() - lse_nH).to(own_lse.dtype).unsqueeze(-1)
        down_nHV = (share_nH1 * dout_nHV).to(own_out.dtype)
        partial = own_lse.dtype
        # delta_own as FlexAttention's backward computes it, from the rounded tensors
        delta_own = (down_nHV.to(partial) * own_out.detach().to(partial)).sum(-1)
        delta = (dout_nHV.to(partial) * out_nHV.to(partial)).sum(-1)
        down_lse_nH = delta_own - share_nH1.squeeze(-1) * delta
        grads = torch.autograd.grad((own_out, own_lse), leaves, (down_nHV, down_lse_nH))
        dbias_table = None
        if table is not None:
            dbias_table = grads[3]
        return grads[0], grads[1], grads[2], dbias_table

    def _attention(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKV: Tensor, call: VarlenCall, scores: ScoreRules, table: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return one call's output [n, H, V] and log-sum-exp [n, H], under autograd."""
        prepared = self._prepared.of(call)
        run, attention = _by_heads, self.ops
        if attention is None:
            bidirectional = scores.relative_bias is not None and scores.relative_bias.bidirectional
            kind = (scores.scale, scores.softcap, scores.rules, bidirectional, torch.is_grad_enabled())
            run, attention = _compiled(kind), flex_attention
        out_nHV, lse_nH = run(
            _filled_rows(q_nHD),
            _filled_rows(k_mKD),
            _filled_rows(v_mKV),
            attention,
            score_mod=score_rule(prepared, scores, table),
            block_mask=prepared.mask,
            scale=scores.scale,
            enable_gqa=q_nHD.shape[1] != k_mKD.shape[1],
        )
        rows = len(q_nHD)
        return out_nHV[:rows], lse_nH[:rows]


class Prepared(NamedTuple):
    """FlexAttention inputs that depend only on the call, computed once for all layers."""

    mask: BlockMask
    from_q: Tensor
    """Int64 [n]: query row q and key row k are from_q[q] − from_k[k] tokens apart, if one sees the other."""
    from_k: Tensor

    def num_bytes(self) -> int:
        """Return its tensors' size on the device, in bytes."""
        tensors = [x for x in self.mask.as_tuple() if isinstance(x, Tensor)]
        tensors.extend((self.from_q, self.from_k))
        return sum(x.numel() * x.element_size() for x in tensors)


class PreparedCalls:
    """LRU cache for ``Prepared``, limited to ``most_bytes``; an entry lives no longer than its call.

    A schedule builds its calls once and all layers share them, so calls are keyed by identity.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self.num_bytes = most_bytes, 0
        # keyed by identity, most recently used last
        self._known: OrderedDict[int, tuple[ref[VarlenCall], Prepared]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, call: VarlenCall) -> Prepared:
        """Return this call's FlexAttention inputs; prepare them on first use."""
        key = id(call)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key][1]
        prepared = prepare_call(call)
        self._known[key] = ref(call, lambda _: self._evict(key)), prepared
        self.num_bytes += prepared.num_bytes()
        # keep the newest whatever its size: it is about to be used
        while self.num_bytes > self._most_bytes and len(self._known) > 1:
            self._evict(next(iter(self._known)))
        return prepared

    def _evict(self, key: int) -> None:
        if key in self._known:
            self.num_bytes -= self._known.pop(key)[1].num_bytes()


def prepare_call(call: VarlenCall) -> Prepared:
    """Build the block mask, and the rows' token positions in their document."""
    row_q, sequence_q = _rows_of(call.cu_seqlens_q, call.num_queries)
    row_k, sequence_k = _rows_of(call.cu_seqlens_k, call.num_keys)
    from_q = call.steps[sequence_q] * row_q + call.offsets[sequence_q]
    first, stop = visible_keys(call)
    # Padding rows see the first key, so no row is without a key; their output is unused, so they contribute no
    # gradient.
    first, stop, from_q = _filled_rows(first), _filled_rows(stop, value=1), _filled_rows(from_q)
    mask = block_mask(first, stop, max(call.num_keys, _LEAST_ROWS))
    return Prepared(mask, from_q, _filled_rows(call.steps[sequence_k] * row_k))


def _filled_rows(x_n: Tensor, value: int = 0) -> Tensor:
    """Pad x [n, …] with this value, after its last row, to at least ``_LEAST_ROWS`` rows."""
    missing = _LEAST_ROWS - len(x_n)
    if missing > 0:
        return pad(x_n, (0, 0) * (x_n.ndim - 1) + (0, missing), value=value)
    return x_n


def visible_keys(call: VarlenCall) -> tuple[Tensor, Tensor]:
    """Return ``first`` and ``stop``, int32 [n]: each packed query row sees keys first <= k < stop.

    One range per row is enough, since a sequence has one window.
    """
    row, sequence = _rows_of(call.cu_seqlens_q, call.num_queries)
    length_q, length_k = call.cu_seqlens_q.diff()[sequence], call.cu_seqlens_k.diff()[sequence]
    diagonal = row + length_k - length_q  # the key that the kernel counts as 0
    first, stop = torch.zeros_like(diagonal), length_k
    if call.left != UNBOUNDED:
        first = (diagonal - call.left).clamp_min(0)
    if call.right != UNBOUNDED:
        stop = torch.minimum(diagonal + call.right + 1, length_k)
    start = call.cu_seqlens_k[:-1][sequence]
    return (start + first).int(), (start + stop).int()


def _rows_of(cu_seqlens: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return (index within its sequence, sequence) for each packed row."""
    lengths = cu_seqlens.diff()
    sequences = torch.arange(len(lengths), device=cu_seqlens.device)
    sequence = torch.repeat_interleave(sequences, lengths, output_size=num_rows)  # the explicit size avoids a host sync
    return torch.arange(num_rows, device=cu_seqlens.device) - cu_seqlens[:-1][sequence], sequence


def block_mask(first: Tensor, stop: Tensor, num_keys: int) -> BlockMask:
    """Build the mask from each row's visible keys [first, stop)."""
    rows = len(first)
    num_q, num_k = -(-rows // _BLOCK), -(-num_keys // _BLOCK)
    missing = num_q * _BLOCK - rows

    def by_block(x: Tensor, value: int) -> Tensor:
        return pad(x, (0, missing), value=value).view(num_q, _BLOCK)

    # A query block visits all key blocks from its rows' smallest ``first`` to their largest ``stop``. A key block needs
    # no mask if all rows see all its keys.
    hull_first = by_block(first, num_keys).amin(1) // _BLOCK
    hull_stop = -(-by_block(stop, 0).amax(1) // _BLOCK)
    whole_first = -(-by_block(first, num_keys).amax(1) // _BLOCK)  # a block with missing rows is never unmasked
    whole_stop = by_block(stop, 0).amin(1) // _BLOCK
    k = torch.arange(num_k, device=first.device)
    whole = (whole_first[:, None] <= k) & (k < whole_stop[:, None])
    partial = (hull_first[:, None] <= k) & (k < hull_stop[:, None]) & ~whole

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (first[q] <= kv) & (kv < stop[q])

    num_partial, partial_order = _ordered(partial)
    num_whole, whole_order = _ordered(whole)
    return BlockMask.from_kv_blocks(
        num_partial,
        partial_order,
        num_whole,
        whole_order,
        BLOCK_SIZE=_BLOCK,
        mask_mod=mask,
        seq_lengths=(rows, num_keys),
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Count the marked key blocks per row block, [1, 1, rows], and order key blocks, marked ones first, [1, 1, rows,
    keys].
    """
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


def score_rule(prepared: Prepared, scores: ScoreRules, table_NH: Tensor | None) -> Callable[..., Tensor] | None:
    """Build a function that applies soft cap, ALiBi and learned bias to a score, in this order; None without rules."""
    if not scores.rules:
        return None
    cap, slopes, bias = scores.softcap, scores.alibi_slopes_H, scores.relative_bias
    from_q, from_k = prepared.from_q, prepared.from_k
    last, bucket = 0, None
    if bias is not None:
        # all distances beyond the largest share its bucket, so a short table serves any length
        last = bias.max_distance
        bucket = buckets(torch.arange(-last, last + 1, device=from_q.device), bias)

    def rule(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if slopes is None and bucket is None:
            return score
        distance = from_q[q] - from_k[kv]
        if slopes is not None:
            score = score - slopes[h] * distance.abs()
        if bucket is not None and table_NH is not None:
            score = score + table_NH[bucket[distance.clamp(-last, last) + last], h]
        return score

    return rule


def _table(scores: ScoreRules) -> Tensor | None:
    if scores.relative_bias is None:
        return None
    return scores.relative_bias.table_NH


@lru_cache(maxsize=32)
def _compiled(kind: tuple) -> Any:
    """Compile ``flex_attention`` for one kind of score, with or without gradients."""
    # PyTorch counts recompilations per code object and turns a number that changes between calls into a variable, which
    # FlexAttention's kernels do not accept as a scale. So each kind gets its own code object: its scale and soft cap
    # stay constant, and it recompiles only the first times that row and key counts change.
    name = re.sub(r"\W", "_", f"flex_attention{kind}")
    function = FunctionType(_by_heads.__code__.replace(co_name=name), globals(), name)
    # One graph: past its recompilation limit PyTorch must fail, not fall back to materializing all scores. Lengths
    # become dynamic automatically with the second length; ``dynamic=True`` would also make the scale a variable.
    return torch.compile(function, fullgraph=True)


def _by_heads(
    q_nHD: Tensor, k_mKD: Tensor, v_mKV: Tensor, attention: Callable[..., Any], **options: Any
) -> tuple[Tensor, Tensor]:
    """Return output [n, H, V] and log-sum-exp [n, H] for packed rows."""
    # Transpose within the graph: given a view, PyTorch would also specialize on the view's base.
    q_1HnD, k_1KmD, v_1KmV = (x.transpose(0, 1).unsqueeze(0) for x in (q_nHD, k_mKD, v_mKV))
    out_1HnV, aux = attention(q_1HnD, k_1KmD, v_1KmV, return_aux=AuxRequest(lse=True), **options)
    return out_1HnV[0].transpose(0, 1), aux.lse[0].transpose(0, 1)

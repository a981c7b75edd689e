"""What CUDA kernels over packed sequences share: slices become calls, and the calls' results are merged or added.

Axes: B batch, t query and s key rows of this device, n query and m key rows packed for one call (all batch rows behind
each other), H query heads, K key heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from longctx.kernels.attention.bias import check_scores
from longctx.kernels.attention.contract import Gradients, KernelRequest, Scores, merge_
from longctx.kernels.attention.flash.calls import Rows, VarlenCall, translate
from longctx.kernels.attention.slices import once_per_table
from longctx.kernels.dtypes import accumulate_dtype


@dataclass(frozen=True, eq=False)
class Sequences:
    """A call on its device, for B batch rows that have the same sequences."""

    queries: Rows
    keys: Rows
    num_queries: int
    num_keys: int
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    left: int
    right: int
    is_first: bool
    """Whether no earlier call touches any of its query rows."""
    steps: Tensor
    """Int64 [sequences]; tokens of a sequence stand ``step·(i − j) + offset`` apart."""
    offsets: Tensor


class VarlenKernel(ABC):
    """An attention kernel made of calls over packed sequences; a subclass adds one call's forward and backward."""

    def __init__(self, name: str, *, capability: tuple[int, int] | None = None) -> None:
        """``capability`` is the compute capability to go by (None: the current CUDA device's)."""
        self.name, self.capability = name, capability

    @abstractmethod
    def supports(self, request: KernelRequest) -> str | None:
        """None when the kernel can serve the request, else the reason why not."""

    @abstractmethod
    def call_forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKV: Tensor, call: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Output [n, H, V] and log-sum-exp [n, H] of one call, in any dtype."""

    @abstractmethod
    def call_backward(
        self,
        dout_nHV: Tensor,
        q_nHD: Tensor,
        k_mKD: Tensor,
        v_mKV: Tensor,
        out_nHV: Tensor,
        lse_nH: Tensor,
        call: Sequences,
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """dq, dk, dv (in any dtype) and the bias table's gradient (None without one) of one call."""

    def calls(self, slices: Tensor, q_BtHD: Tensor, scores: Scores) -> tuple[Sequences, ...]:
        """The calls for these slices."""
        return calls_on(slices, q_BtHD.shape[0], q_BtHD.device, distances=scores.needs_distances)

    def device_capability(self) -> tuple[int, int] | None:
        """The compute capability to go by; None without a CUDA device."""
        if self.capability is not None:
            return self.capability
        if torch.cuda.is_available():
            return torch.cuda.get_device_capability()
        return None

    def forward(
        self, q_BtHD: Tensor, k_BsKD: Tensor, v_BsKV: Tensor, slices: Tensor, *, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        check_scores(scores, q_BtHD.shape[2])
        result = _Result(q_BtHD, v_BsKV.shape[-1])
        for call in self.calls(slices, q_BtHD, scores):
            q, k, v = pack(q_BtHD, call.queries), pack(k_BsKD, call.keys), pack(v_BsKV, call.keys)
            out_nHV, lse_nH = self.call_forward(q, k, v, call, scores)
            result.merge(out_nHV, lse_nH, call)
        return result.get()

    def backward(
        self,
        dout_BtHV: Tensor,
        q_BtHD: Tensor,
        k_BsKD: Tensor,
        v_BsKV: Tensor,
        out_BtHV: Tensor,
        lse_BtH: Tensor,
        slices: Tensor,
        *,
        scores: Scores,
    ) -> Gradients:
        check_scores(scores, q_BtHD.shape[2])
        dq, dk, dv = _Gradient(q_BtHD), _Gradient(k_BsKD), _Gradient(v_BsKV)
        bias, dtable = scores.relative_bias, None
        if bias is not None:
            # calls give theirs in the table's dtype; there are many, so their sum is wider
            dtable = torch.zeros_like(bias.table_NH, dtype=accumulate_dtype(q_BtHD.dtype))
        for call in self.calls(slices, q_BtHD, scores):
            q, k, v = pack(q_BtHD, call.queries), pack(k_BsKD, call.keys), pack(v_BsKV, call.keys)
            # out and lse are global, over all calls, hops and ranks: then each call's gradients are simply added
            dout, out, lse = (pack(x, call.queries) for x in (dout_BtHV, out_BtHV, lse_BtH))
            dq_nHD, dk_mKD, dv_mKV, dtable_part = self.call_backward(dout, q, k, v, out, lse, call, scores)
            dq.add(dq_nHD, call.queries)
            dk.add(dk_mKD, call.keys)
            dv.add(dv_mKV, call.keys)
            if dtable is not None and dtable_part is not None:
                dtable += dtable_part
        return Gradients(dq.get(), dk.get(), dv.get(), dtable)


class _Result:
    """Output and log-sum-exp of all query rows, merged call by call."""

    def __init__(self, q_BtHD: Tensor, value_dim: int) -> None:
        self._q_BtHD, self._value_dim = q_BtHD, value_dim
        self._merged: tuple[Tensor, Tensor] | None = None

    def merge(self, out_nHV: Tensor, lse_nH: Tensor, call: Sequences) -> None:
        """Merge one call's output and log-sum-exp into those of its query rows."""
        B, t = self._q_BtHD.shape[:2]
        part = out_nHV.unflatten(0, (B, -1)).to(accumulate_dtype(self._q_BtHD.dtype))
        part_lse = lse_nH.unflatten(0, (B, -1)).double()
        # the usual case: one call for all rows, nothing to copy
        if self._merged is None and _is_all(call.queries, t):
            self._merged = part, part_lse
            return
        if self._merged is None:
            self._merged = self._nothing()
        out, lse = self._merged
        rows = call.queries
        if call.is_first:
            out[:, rows], lse[:, rows] = part, part_lse
        elif isinstance(rows, slice):
            merge_(out[:, rows], lse[:, rows], part, part_lse)
        else:  # rows that are no neighbours cannot be merged in place
            so_far, so_far_lse = out.index_select(1, rows), lse.index_select(1, rows)
            merge_(so_far, so_far_lse, part, part_lse)
            out[:, rows], lse[:, rows] = so_far, so_far_lse

    def get(self) -> tuple[Tensor, Tensor]:
        """Return what all calls gave."""
        if self._merged is None:
            return self._nothing()
        return self._merged

    def _nothing(self) -> tuple[Tensor, Tensor]:
        """The result over no key."""
        q = self._q_BtHD
        B, t, H, _ = q.shape
        out = q.new_zeros((B, t, H, self._value_dim), dtype=accumulate_dtype(q.dtype))
        return out, q.new_full((B, t, H), -torch.inf, dtype=torch.float64)


class _Gradient:
    """The gradient of a tensor [B, t, …], added up call by call.

    A call names a row once, so the calls alone decide the order of additions: it is the same in every run.
    """

    def __init__(self, like_Bt: Tensor) -> None:
        self._like_Bt, self._total_Bt = like_Bt, None
        self._dtype = accumulate_dtype(like_Bt.dtype)

    def add(self, part: Tensor, rows: Rows) -> None:
        """Add one call's gradient of its rows."""
        B, t = self._like_Bt.shape[:2]
        part_Bn = part.unflatten(0, (B, -1))
        if self._total_Bt is None and _is_all(rows, t):
            self._total_Bt = part_Bn.to(self._dtype)
            return
        total_Bt = self._total_Bt = self.get()
        if isinstance(rows, slice):
            total_Bt[:, rows] += part_Bn
        else:
            # no row occurs twice in a call, so reading and writing back loses no addition
            total_Bt[:, rows] = total_Bt.index_select(1, rows) + part_Bn

    def get(self) -> Tensor:
        """Return the sum; zeros where there was no call."""
        if self._total_Bt is None:
            return self._like_Bt.new_zeros(self._like_Bt.shape, dtype=self._dtype)
        return self._total_Bt


@once_per_table
def calls_on(slices: Tensor, B: int, device: torch.device, *, distances: bool) -> tuple[Sequences, ...]:
    """The calls for a table, their tensors on the device: made once, so that only the first layer copies anything."""
    return tuple(on_device(call, B, device) for call in translate(slices, distances=distances))


def on_device(call: VarlenCall, B: int, device: torch.device) -> Sequences:
    """The call for B batch rows of the same sequences, its tensors copied to the device."""

    def copied(x: Tensor) -> Tensor:
        return x.to(device, non_blocking=True)  # no wait for the kernels before it

    def bounds(cu_seqlens: Tensor) -> Tensor:
        """The sequences of all batch rows, behind each other."""
        first = torch.arange(B, dtype=cu_seqlens.dtype)[:, None] * cu_seqlens[-1]
        return copied(torch.cat((cu_seqlens[:1], (cu_seqlens[1:] + first).flatten())))

    def rows(x: Rows) -> Rows:
        if isinstance(x, slice):
            return x
        return copied(x)

    return Sequences(
        queries=rows(call.queries),
        keys=rows(call.keys),
        num_queries=B * call.num_queries,
        num_keys=B * call.num_keys,
        cu_seqlens_q=bounds(call.cu_seqlens_q),
        cu_seqlens_k=bounds(call.cu_seqlens_k),
        max_seqlen_q=call.max_seqlen_q,
        max_seqlen_k=call.max_seqlen_k,
        left=call.left,
        right=call.right,
        is_first=call.is_first,
        steps=copied(call.steps.repeat(B)),
        offsets=copied(call.offsets.repeat(B)),
    )


def pack(x_Bt: Tensor, rows: Rows) -> Tensor:
    """The rows [B·n, …] of a tensor [B, t, …]; a view where they lie behind each other already."""
    if isinstance(rows, slice):
        return x_Bt[:, rows].flatten(0, 1)
    return x_Bt.index_select(1, rows).flatten(0, 1)


def padded(x: Tensor, size: int) -> Tensor:
    """x with zeros behind its last axis up to ``size``, channels side by side: kernels read them in words."""
    missing = size - x.shape[-1]
    if missing:
        return functional.pad(x, (0, missing))
    if x.stride(-1) != 1:
        return x.contiguous()
    return x


def shape_refusal(request: KernelRequest, *, largest_head: int) -> str | None:
    """Why heads of this size or number cannot be served."""
    head = max(request.head_dim, request.value_dim or 0)
    if head > largest_head:
        return f"heads of {head} are too large; up to {largest_head} for {_short(request.dtype)}"
    if request.num_heads % request.num_kv_heads:
        return f"{request.num_heads} query heads do not share {request.num_kv_heads} key heads evenly"
    return None


def capability_refusal(capability: tuple[int, int] | None, generations: tuple[int, int | None]) -> str | None:
    """Why a device of this compute capability (None: no device) is not one of these generations."""
    first, last = generations
    if capability is not None and first <= capability[0] and (last is None or capability[0] <= last):
        return None
    wanted = f"{first} to {last}"
    if last is None:
        wanted = f"{first}.0 or newer"
    elif last == first:
        wanted = str(first)
    device = "there is no CUDA device"
    if capability is not None:
        device = f"the device has {capability[0]}.{capability[1]}"
    return f"needs compute capability {wanted}; {device}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_all(rows: Rows, count: int) -> bool:
    return isinstance(rows, slice) and rows == slice(0, count)

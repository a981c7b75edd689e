"""The loop that flash kernels share: a table of slices becomes varlen calls, whose partial results are merged or added.

Axes: B batch, t query and s key rows of this device, n query and m key rows packed for one call (all batch rows behind
each other), H query heads, K key heads, D query/key head size, V value head size.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from longctx.kernels.attention.bias import check_scores
from longctx.kernels.attention.contract import Gradients, KernelRequest, Scores, merge_
from longctx.kernels.attention.flash.calls import Rows, VarlenCall, translate
from longctx.kernels.dtypes import accumulate_dtype

HALF = (torch.bfloat16, torch.float16)
"""What flash kernels compute in."""


class Sequences(NamedTuple):
    """A varlen call on its device, for B batch rows that share its sequences."""

    queries: Rows
    keys: Rows
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    num_keys: int
    left: int
    right: int
    fresh: bool
    steps: Tensor
    """Int64 [sequences]; distances of a sequence are ``step·(i − j) + offset``."""
    offsets: Tensor
    slope_factors: Tensor | None
    """Float32 [sequences, 1]: times the slopes."""
    shifts_n1: Tensor | None
    """Float64 [n, 1]: times the slopes, what is to be taken from the kernel's log-sum-exps."""


class VarlenKernel(ABC):
    """An attention kernel made of calls over packed sequences; adapters add one call's forward and backward."""

    base = "varlen"

    def __init__(
        self, ops: Any = None, *, capability: tuple[int, int] | None = None, deterministic: bool = False
    ) -> None:
        """``ops`` are the library's functions (None: import them when first needed), ``capability`` the compute
        capability to go by (None: the current CUDA device's). A deterministic kernel is one of its own, since it is
        slower; its name ends in ``_deterministic``."""
        self.name = f"{self.base}_deterministic" if deterministic else self.base
        self.ops, self.capability, self.deterministic = ops, capability, deterministic
        self._bound: OrderedDict[tuple[int, int, torch.device], tuple[VarlenCall, Sequences]] = OrderedDict()

    @abstractmethod
    def supports(self, request: KernelRequest) -> str | None:
        """None when the kernel can serve the request, else the reason why not."""

    @abstractmethod
    def call_forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKV: Tensor, call: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Output [n, H, V] in any dtype and the scores' true log-sum-exp [n, H] of one call."""

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

    def device_capability(self) -> tuple[int, int] | None:
        """The compute capability to go by; None without a CUDA device."""
        return compute_capability() if self.capability is None else self.capability

    def plan(self, slices: Tensor, scores: Scores) -> tuple[VarlenCall, ...]:
        """The calls for these slices."""
        return translate(slices, alibi=scores.alibi_slopes_H is not None)

    def not_deterministic(self, request: KernelRequest) -> str | None:
        """The refusal of a request for a deterministic backward, where there is a kernel of its own for that."""
        if request.deterministic and not self.deterministic:
            return f"its backward is not deterministic; {self.base}_deterministic's is"
        return None

    def forward(
        self, q_BtHD: Tensor, k_BsKD: Tensor, v_BsKV: Tensor, slices: Tensor, *, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        B, t, H, _ = q_BtHD.shape
        check_scores(scores, H)
        out = lse = None
        for call in self._on_device(self.plan(slices, scores), q_BtHD):
            q, k, v = (pack(x, rows) for x, rows in _sides(call, q_BtHD, k_BsKD, v_BsKV))
            out_nHV, lse_nH = self.call_forward(q, k, v, call, scores)
            part = out_nHV.unflatten(0, (B, -1)).to(accumulate_dtype(q_BtHD.dtype))
            part_lse = lse_nH.unflatten(0, (B, -1)).double()
            if out is not None and lse is not None:
                _fold(out, lse, part, part_lse, call)
            elif _is_all(call.queries, t):  # the usual case: nothing to put together
                out, lse = part, part_lse
            else:
                out, lse = part.new_zeros(B, t, H, part.shape[-1]), part_lse.new_full((B, t, H), -torch.inf)
                _fold(out, lse, part, part_lse, call)
        if out is None or lse is None:
            out = q_BtHD.new_zeros(B, t, H, v_BsKV.shape[-1], dtype=accumulate_dtype(q_BtHD.dtype))
            lse = q_BtHD.new_full((B, t, H), -torch.inf, dtype=torch.float64)
        return out, lse

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
        dtable: Tensor | None = None
        totals: list[Tensor | None] = [None, None, None]
        for call in self._on_device(self.plan(slices, scores), q_BtHD):
            sides = _sides(call, q_BtHD, k_BsKD, v_BsKV)
            q, k, v = (pack(x, rows) for x, rows in sides)
            dout, out, lse = (pack(x, call.queries) for x in (dout_BtHV, out_BtHV, lse_BtH))
            *parts, dbias = self.call_backward(dout, q, k, v, out, lse, call, scores)
            for n, ((x, rows), part) in enumerate(zip(sides, parts, strict=True)):
                totals[n] = _added(totals[n], x, rows, part)
            if dbias is not None:
                dtable = dbias if dtable is None else dtable + dbias
        dq, dk, dv = (
            x.new_zeros(x.shape, dtype=accumulate_dtype(x.dtype)) if total is None else total
            for x, total in zip((q_BtHD, k_BsKD, v_BsKV), totals, strict=True)
        )
        return Gradients(dq, dk, dv, _table_gradient(dtable, scores, dq.dtype))

    def _on_device(self, calls: tuple[VarlenCall, ...], q_BtHD: Tensor) -> list[Sequences]:
        return [self._place(call, q_BtHD.shape[0], q_BtHD.device) for call in calls]

    def _place(self, call: VarlenCall, B: int, device: torch.device) -> Sequences:
        """The call's tensors on the device; kept, so that a step copies nothing but in its first layer."""
        key = (id(call), B, device)
        if key not in self._bound:
            self._bound[key] = (call, _bind(call, B, device))  # the call is kept alive, so its id stays its own
            if len(self._bound) > 1024:
                self._bound.popitem(last=False)
        return self._bound[key][1]


def _bind(call: VarlenCall, B: int, device: torch.device) -> Sequences:
    def bounds(cu: Tensor) -> Tensor:
        rows = torch.arange(B, dtype=cu.dtype)[:, None] * cu[-1]
        return torch.cat((cu[:1], (cu[1:] + rows).flatten())).to(device)

    def rows(x: Rows) -> Rows:
        return x if isinstance(x, slice) else x.to(device)

    factors = shifts = None
    if call.slope_factors is not None and call.shifts is not None:
        factors = call.slope_factors.float().repeat(B)[:, None].to(device)
        shifts = call.shifts.double().repeat_interleave(call.cu_seqlens_q.diff()).repeat(B)[:, None].to(device)
    return Sequences(
        rows(call.queries),
        rows(call.keys),
        bounds(call.cu_seqlens_q),
        bounds(call.cu_seqlens_k),
        call.max_seqlen_q,
        call.max_seqlen_k,
        B * call.num_keys,
        call.left,
        call.right,
        call.fresh,
        call.steps.repeat(B).to(device),
        call.offsets.repeat(B).to(device),
        factors,
        shifts,
    )


def _sides(call: Sequences, q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, Rows], ...]:
    return (q, call.queries), (k, call.keys), (v, call.keys)


def pack(x_Bt: Tensor, rows: Rows) -> Tensor:
    """The rows [B·n, …] of a tensor [B, t, …]; a view where they lie behind each other already."""
    taken = x_Bt[:, rows] if isinstance(rows, slice) else x_Bt.index_select(1, rows)
    return taken.flatten(0, 1)


def _added(total_Bt: Tensor | None, like_Bt: Tensor, rows: Rows, part: Tensor) -> Tensor:
    """A gradient with a call's part of it [B·n, …] added; a call names a row once, so the order is the calls'."""
    part_Bn = part.unflatten(0, (like_Bt.shape[0], -1))
    partial = accumulate_dtype(like_Bt.dtype)
    if total_Bt is None and _is_all(rows, like_Bt.shape[1]):
        return part_Bn.to(partial)
    if total_Bt is None:
        total_Bt = like_Bt.new_zeros(like_Bt.shape, dtype=partial)
    if isinstance(rows, slice):
        total_Bt[:, rows] += part_Bn
    else:
        total_Bt[:, rows] = total_Bt.index_select(1, rows) + part_Bn
    return total_Bt


def _table_gradient(dtable: Tensor | None, scores: Scores, partial: torch.dtype) -> Tensor | None:
    """The bias table's gradient in the dtype of partial results; zeros where no key was met."""
    if scores.relative_bias is None:
        return None
    return torch.zeros_like(scores.relative_bias.table_NH, dtype=partial) if dtable is None else dtable.to(partial)


def _is_all(rows: Rows, count: int) -> bool:
    return isinstance(rows, slice) and rows == slice(0, count)


def _fold(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, call: Sequences) -> None:
    """Merge a call's rows into the whole."""
    rows = call.queries
    if call.fresh:
        out[:, rows], lse[:, rows] = part, part_lse
    elif isinstance(rows, slice):
        merge_(out[:, rows], lse[:, rows], part, part_lse)
    else:
        so_far, so_far_lse = out.index_select(1, rows), lse.index_select(1, rows)
        merge_(so_far, so_far_lse, part, part_lse)
        out[:, rows], lse[:, rows] = so_far, so_far_lse


def padded(x: Tensor, size: int) -> Tensor:
    """x with zeros behind its last axis up to ``size``: they change no score, and come back as zeros."""
    return x if x.shape[-1] == size else functional.pad(x, (0, size - x.shape[-1]))


def equal_head_size(head_dim: int, value_dim: int, multiple: int = 8) -> int:
    """The head size both take where a kernel knows only one, in whole ``multiple``s."""
    return -(-max(head_dim, value_dim) // multiple) * multiple


def from_heads(lse_Hn: Tensor) -> Tensor:
    """A kernel's [H, n] as [n, H]."""
    return lse_Hn.transpose(0, 1)


def to_heads(lse_nH: Tensor) -> Tensor:
    """Log-sum-exps [n, H] as flash kernels want them: float32 [H, n], contiguous."""
    return lse_nH.transpose(0, 1).float().contiguous()


@lru_cache(maxsize=16)
def import_library(name: str) -> ModuleType | str:
    """The module, or on one line why it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # built for another PyTorch or driver
        return f"{name} cannot be imported ({str(error).splitlines()[0] if str(error) else type(error).__name__})"


def refusal(request: KernelRequest, *, lacks: Sequence[str], largest_head: int = 256) -> str | None:
    """Why no flash kernel takes the request: the reasons that need neither a library nor a device."""
    if request.device_type != "cuda":
        return f"it runs on CUDA devices, not on {request.device_type}"
    if request.dtype not in HALF:
        return f"it computes in bfloat16 and float16, not in {str(request.dtype).removeprefix('torch.')}"
    if (wish := next((w for w in lacks if getattr(request, w)), None)) is not None:
        return f"it has no {wish.replace('_', ' ')}"
    head = max(request.head_dim, request.value_dim or 0)
    if head > largest_head:
        return f"heads of {head} are too large for it; it takes up to {largest_head}"
    if request.num_heads % request.num_kv_heads:
        return f"{request.num_heads} query heads do not share {request.num_kv_heads} key heads evenly"
    return None


def compute_capability() -> tuple[int, int] | None:
    """The current CUDA device's, None without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None

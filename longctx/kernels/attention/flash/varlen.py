"""Base for CUDA kernels over packed sequences: convert slices to calls, and merge or add their results.

Axes: B batch, t query and s key rows of this device, n query and m key rows packed for one call (all batch rows, one
after another), H query heads, K key heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from longctx.errors import ConfigError
from longctx.kernels.attention.bias import check_scores
from longctx.kernels.attention.flash.calls import Rows, VarlenCall, slices_to_calls
from longctx.kernels.attention.kernel_interface import RULES, Gradients, KernelRequest, ScoreRules, merge_
from longctx.kernels.attention.slices import once_per_table
from longctx.kernels.dtypes import accumulate_dtype, as_dtype

ThreeTensors = tuple[Tensor, Tensor, Tensor]
HALF = (torch.bfloat16, torch.float16)
"""Dtypes that flash libraries and cuDNN compute in."""


class VarlenKernel(ABC):
    """Attention kernel built from calls over packed sequences; subclasses implement one call's forward and backward.

    Heads are zero-padded to a supported size: zeros change no score, and the results' padding is cut off.
    """

    unsupported_rules: tuple[str, ...] = ()
    """Unsupported score rules."""
    deterministic = False
    """Whether backward is bitwise reproducible."""

    def __init__(self, name: str, *, capability: tuple[int, int] | None = None) -> None:
        """Create the kernel; ``capability`` is the compute capability to assume (None: the current CUDA device's)."""
        self.name, self.capability = name, capability

    @abstractmethod
    def supports(self, request: KernelRequest) -> str | None:
        """Return None if the kernel can serve the request, else the reason why not."""

    @abstractmethod
    def head_sizes(self, head_dim: int, value_dim: int) -> tuple[int, int] | None:
        """Return the padded sizes for query/key heads and value heads, if any size is large enough."""

    @abstractmethod
    def call_forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKV: Tensor, call: VarlenCall, scores: ScoreRules
    ) -> tuple[Tensor, Tensor]:
        """Return one call's output [n, H, V] and log-sum-exp [n, H], in any dtype."""

    @abstractmethod
    def call_backward(
        self, dout_nHV: Tensor, qkv: ThreeTensors, result: tuple[Tensor, Tensor], call: VarlenCall, scores: ScoreRules
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return one call's dq, dk, dv (in any dtype) and bias table gradient (if there is a table).

        ``result`` is the output [n, H, V] and the log-sum-exp [n, H] over all calls, hops and ranks.
        """

    def calls(self, slices: Tensor, q_BtHD: Tensor, scores: ScoreRules) -> tuple[VarlenCall, ...]:
        """Return the calls for these slices."""
        return calls_on(slices, q_BtHD.shape[0], q_BtHD.device, relative_positions=scores.needs_relative_positions)

    def device_capability(self) -> tuple[int, int] | None:
        """Return the compute capability to assume, if there is a CUDA device."""
        if self.capability is not None:
            return self.capability
        if torch.cuda.is_available():
            return torch.cuda.get_device_capability()
        return None

    def forward(
        self, q_BtHD: Tensor, k_BsKD: Tensor, v_BsKV: Tensor, slices: Tensor, *, scores: ScoreRules
    ) -> tuple[Tensor, Tensor]:
        self._check(scores, q_BtHD.shape[2])
        V = v_BsKV.shape[-1]
        result, sizes = _Result(q_BtHD, V), self._padded_sizes(q_BtHD.shape[-1], V)
        for call in self.calls(slices, q_BtHD, scores):
            q, k, v = _packed_inputs(q_BtHD, k_BsKD, v_BsKV, call, sizes)
            out_nHV, lse_nH = self.call_forward(q, k, v, call, scores)
            result.merge(out_nHV[..., :V], lse_nH, call)
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
        scores: ScoreRules,
    ) -> Gradients:
        self._check(scores, q_BtHD.shape[2])
        D, V = q_BtHD.shape[-1], v_BsKV.shape[-1]
        sizes = self._padded_sizes(D, V)
        dq, dk, dv = _Gradient(q_BtHD), _Gradient(k_BsKD), _Gradient(v_BsKV)
        # Each call returns it in the table's dtype; many calls are summed, so the accumulator is wider.
        dbias_table = scores.table_gradient(accumulate_dtype(q_BtHD.dtype))
        for call in self.calls(slices, q_BtHD, scores):
            qkv = _packed_inputs(q_BtHD, k_BsKD, v_BsKV, call, sizes)
            # out and lse are global, over all calls, hops and ranks, so the calls' gradients simply add up
            dout, out = (padded(pack_rows(x, call.queries), sizes[1]) for x in (dout_BtHV, out_BtHV))
            result = out, pack_rows(lse_BtH, call.queries)
            dq_nHD, dk_mKD, dv_mKV, dbias_table_part = self.call_backward(dout, qkv, result, call, scores)
            dq.add(dq_nHD[..., :D], call.queries)
            dk.add(dk_mKD[..., :D], call.keys)
            dv.add(dv_mKV[..., :V], call.keys)
            if dbias_table is not None and dbias_table_part is not None:
                dbias_table += dbias_table_part
        return Gradients(dq.get(), dk.get(), dv.get(), dbias_table)

    def _check(self, scores: ScoreRules, num_heads: int) -> None:
        """Raise ConfigError for unsupported rules: operators call a kernel by name and skip ``supports``."""
        check_scores(scores, num_heads)
        for rule in scores.rules:
            if rule in self.unsupported_rules:
                raise ConfigError(
                    f"parallel.kernel={self.name} does not support {RULES[rule]}. Try parallel.kernel=auto."
                )

    def _padded_sizes(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        sizes = self.head_sizes(head_dim, value_dim)
        if sizes is None:
            raise ConfigError(
                f"parallel.kernel={self.name} does not support head size {head_dim} with value size {value_dim} "
                f"on this device (compute capability {self.device_capability()}). Try parallel.kernel=auto."
            )
        return sizes

    def request_unsupported_reason(
        self, request: KernelRequest, *, dtypes: tuple[torch.dtype, ...], largest_head: int
    ) -> str | None:
        """Return why the request cannot be served, or None, by checks that need neither library nor device."""
        if request.device_type != "cuda":
            return f"runs on CUDA devices, not on {request.device_type}"
        if request.dtype not in dtypes:
            return f"computes in {' and '.join(map(_short, dtypes))}, not in {_short(request.dtype)}"
        for rule in request.rules:
            if rule in self.unsupported_rules:
                return f"no {RULES[rule]}; flex has it"
        head = max(request.head_dim, request.value_dim or 0)
        if head > largest_head:
            return f"head size {head} is too large; the limit is {largest_head} for {_short(request.dtype)}"
        if request.num_heads % request.num_kv_heads:
            return f"{request.num_kv_heads} key heads do not divide {request.num_heads} query heads"
        return None

    def device_unsupported_reason(self, request: KernelRequest, generations: tuple[int, int | None]) -> str | None:
        """Return why this device cannot serve the request with a kernel for these generations; None if it can."""
        capability = self.device_capability()
        why = _capability_reason(capability, generations)
        if capability is None or why:
            return why
        head, value = request.head_dim, request.value_dim or request.head_dim
        if self.head_sizes(head, value) is None:
            return f"no head size {head} with value size {value} on compute capability {capability[0]}.x"
        return None


class _Result:
    """Output and log-sum-exp for all query rows, merged call by call."""

    def __init__(self, q_BtHD: Tensor, value_dim: int) -> None:
        self._q_BtHD, self._value_dim = q_BtHD, value_dim
        self._merged: tuple[Tensor, Tensor] | None = None

    def merge(self, out_nHV: Tensor, lse_nH: Tensor, call: VarlenCall) -> None:
        """Merge one call's output and log-sum-exp into its query rows."""
        B, t = self._q_BtHD.shape[:2]
        part = out_nHV.unflatten(0, (B, -1)).to(accumulate_dtype(self._q_BtHD.dtype))
        part_lse = lse_nH.unflatten(0, (B, -1)).double()
        # common case: one call covers all rows, so its result is taken without a copy
        if self._merged is None and _is_all(call.queries, t):
            self._merged = part, part_lse
            return
        if self._merged is None:
            self._merged = self._empty_result()
        out, lse = self._merged
        rows = call.queries
        if call.is_first:
            out[:, rows], lse[:, rows] = part, part_lse
        elif isinstance(rows, slice):
            merge_(out[:, rows], lse[:, rows], part, part_lse)
        else:  # index_select copies: merge the copy, then write it back
            so_far, so_far_lse = out.index_select(1, rows), lse.index_select(1, rows)
            merge_(so_far, so_far_lse, part, part_lse)
            out[:, rows], lse[:, rows] = so_far, so_far_lse

    def get(self) -> tuple[Tensor, Tensor]:
        """Return the merged output and log-sum-exp."""
        if self._merged is None:
            return self._empty_result()
        return self._merged

    def _empty_result(self) -> tuple[Tensor, Tensor]:
        """Return the result over zero keys."""
        q = self._q_BtHD
        B, t, H, _ = q.shape
        out = q.new_zeros((B, t, H, self._value_dim), dtype=accumulate_dtype(q.dtype))
        return out, q.new_full((B, t, H), -torch.inf, dtype=torch.float64)


class _Gradient:
    """Gradient accumulator for a tensor [B, t, …], summed call by call."""

    def __init__(self, like_Bt: Tensor) -> None:
        # Each call contains a row at most once, so the call order alone fixes the summation order: bitwise
        # reproducible.
        self._like_Bt, self._total_Bt = like_Bt, None
        self._dtype = accumulate_dtype(like_Bt.dtype)

    def add(self, part: Tensor, rows: Rows) -> None:
        """Add one call's gradient for its rows."""
        B, t = self._like_Bt.shape[:2]
        part_Bn = part.unflatten(0, (B, -1))
        if self._total_Bt is None and _is_all(rows, t):
            self._total_Bt = part_Bn
            return
        total_Bt = self._total_Bt = as_dtype(self.get(), self._dtype)
        if isinstance(rows, slice):
            total_Bt[:, rows] += part_Bn
        else:
            # no row occurs twice per call, so gather, add and scatter lose no addition
            total_Bt[:, rows] = total_Bt.index_select(1, rows) + part_Bn

    def get(self) -> Tensor:
        """Return the sum, or zeros without a call; a single call's gradient keeps the library's dtype."""
        if self._total_Bt is None:
            return self._like_Bt.new_zeros(self._like_Bt.shape, dtype=self._dtype)
        return self._total_Bt


@once_per_table
def calls_on(slices: Tensor, B: int, device: torch.device, *, relative_positions: bool) -> tuple[VarlenCall, ...]:
    """Return the calls for a table, with tensors on the device; cached, so only the first layer copies them."""
    return tuple(call.on_device(B, device) for call in slices_to_calls(slices, relative_positions=relative_positions))


def pack_rows(x_Bt: Tensor, rows: Rows) -> Tensor:
    """Pack rows of a tensor [B, t, …] into [B·n, …]; a view if they are contiguous already."""
    if isinstance(rows, slice):
        return x_Bt[:, rows].flatten(0, 1)
    return x_Bt.index_select(1, rows).flatten(0, 1)


def _packed_inputs(
    q_BtHD: Tensor, k_BsKD: Tensor, v_BsKV: Tensor, call: VarlenCall, sizes: tuple[int, int]
) -> ThreeTensors:
    """Pack a call's rows and pad heads to these sizes: q [n, H, D], k [m, K, D], v [m, K, V]."""
    D, V = sizes
    return (
        padded(pack_rows(q_BtHD, call.queries), D),
        padded(pack_rows(k_BsKD, call.keys), D),
        padded(pack_rows(v_BsKV, call.keys), V),
    )


def padded(x: Tensor, size: int) -> Tensor:
    """Zero-pad x's last axis to ``size`` and make it contiguous: kernels load channels in vectors."""
    missing = size - x.shape[-1]
    if missing:
        return functional.pad(x, (0, missing))
    if x.stride(-1) != 1:
        return x.contiguous()
    return x


def _capability_reason(capability: tuple[int, int] | None, generations: tuple[int, int | None]) -> str | None:
    """Return why this compute capability (None: no device) is outside the generations; None if it is inside."""
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

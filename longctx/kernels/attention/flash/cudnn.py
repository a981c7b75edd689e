"""cuDNN's fused attention, through PyTorch's operator, behind our kernel interface. For PyTorch 2.11 to 2.13.

The operator attends within one sequence, to all keys or causally from the top-left corner, so slices are cut into
rectangles and squares, one call each. That suits rows with one document, or a few long ones.

Axes: B batch, n query and m key rows of one sequence, H query heads, K key heads, D query/key head size, V value head
size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.attention.flash.calls import UNBOUNDED, VarlenCall, calls_of
from longctx.kernels.attention.flash.slice_groups import Group, trimmed
from longctx.kernels.attention.flash.varlen import HALF, ThreeTensors, VarlenKernel
from longctx.kernels.attention.kernel_interface import RULES, KernelRequest, ScoreRules
from longctx.kernels.attention.slices import HI, K_START, K_STOP, LO, Q_START, Q_STOP, once_per_table

_FAR = 1 << 39
"""Half the open bound's value in trimmed work: larger than any real bound."""
_FIRST_WITH_192 = 91100
"""First cuDNN version with 192-channel heads and 128-channel values, on Hopper and Blackwell."""


# ``auto`` never picks this kernel, for two more reasons: cuDNN builds a plan per pair of lengths, which takes a good
# part of a second and is cached forever, and its gain has not been measured on a GPU yet. Its packed-sequence form is
# unused: PyTorch rebuilds that plan in every backward call, and indexes with 32 bits, too few for tensors with 2^31
# values.
class CudnnKernel(VarlenKernel):
    """Kernel for causal and full masks without a window.

    Heads are bfloat16 or float16, with up to 128 channels, or 192 with 128-channel values.
    """

    unsupported_rules = tuple(RULES)

    def __init__(
        self, ops: Any = None, *, capability: tuple[int, int] | None = None, version: int | None = None
    ) -> None:
        """Create the kernel.

        ``ops`` holds the operators (None: PyTorch's), ``version`` is the cuDNN version (None: PyTorch's).
        """
        super().__init__("cudnn", capability=capability)
        self.ops, self.version = ops, version

    def supports(self, request: KernelRequest) -> str | None:
        if why := self.request_unsupported_reason(request, dtypes=HALF, largest_head=192):
            return why
        if request.window:
            return "no window"
        if request.deterministic:
            return "the backward is not bitwise reproducible"
        return self._missing() or self.device_unsupported_reason(request, (8, None))

    def calls(self, slices: Tensor, q_BtHD: Tensor, scores: ScoreRules) -> tuple[VarlenCall, ...]:
        """Return one call per rectangle or square."""
        return dense_calls_on(slices, q_BtHD.shape[0], q_BtHD.device)

    def call_forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKV: Tensor, call: VarlenCall, scores: ScoreRules
    ) -> tuple[Tensor, Tensor]:
        if call.max_seqlen_k == 1:
            return _one_key(q_nHD, k_mKD, v_mKV, call, scores)
        out_BHnV, lse, *_ = self._operators()._scaled_dot_product_cudnn_attention(
            _by_heads(q_nHD, call.max_seqlen_q),
            _by_heads(k_mKD, call.max_seqlen_k),
            _by_heads(v_mKV, call.max_seqlen_k),
            None,  # attn_bias
            True,  # compute_log_sumexp
            0.0,  # dropout_p
            _is_causal(call),
            scale=scores.scale,
        )
        # eager mode returns [B, H, n], the fake-tensor rule [B, H, n, 1]
        lse_BHn = lse.reshape(out_BHnV.shape[:3])
        return out_BHnV.transpose(1, 2).flatten(0, 1), lse_BHn.transpose(1, 2).flatten(0, 1)

    def call_backward(
        self, dout_nHV: Tensor, qkv: ThreeTensors, result: tuple[Tensor, Tensor], call: VarlenCall, scores: ScoreRules
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        if call.max_seqlen_k == 1:
            return _one_key_backward(dout_nHV, qkv, result, call, scores)
        (q_nHD, k_mKD, v_mKV), (out_nHV, lse_nH) = qkv, result
        n, m = call.max_seqlen_q, call.max_seqlen_k
        # Fix the layout: plans are cached by the lengths and strides of q, k and v, but not of these two.
        dout, out = (x.to(q_nHD.dtype).contiguous() for x in (dout_nHV, out_nHV))
        state = torch.empty((), dtype=torch.int64, device=q_nHD.device)  # for dropout, unused
        grads = self._operators()._scaled_dot_product_cudnn_attention_backward(
            _by_heads(dout, n),
            _by_heads(q_nHD, n),
            _by_heads(k_mKD, m),
            _by_heads(v_mKV, m),
            _by_heads(out, n),
            lse_nH.unflatten(0, (-1, n)).transpose(1, 2).float().contiguous(),
            state,
            state,
            None,  # attn_bias
            None,  # cum_seq_q
            None,  # cum_seq_k
            n,
            m,
            0.0,  # dropout_p
            _is_causal(call),
            scale=scores.scale,
        )
        dq, dk, dv = (x.transpose(1, 2).flatten(0, 1) for x in grads)
        return dq, dk, dv, None

    def _missing(self) -> str | None:
        """Return why PyTorch lacks cuDNN; None if it has it."""
        if self.ops is None and not torch._C._has_cudnn:
            return "this PyTorch was built without cuDNN"
        return None

    def _operators(self) -> Any:
        if missing := self._missing():
            raise ConfigError(f"parallel.kernel=cudnn: {missing}. Try parallel.kernel=auto.")
        return self.ops or torch.ops.aten

    def head_sizes(self, head_dim: int, value_dim: int) -> tuple[int, int] | None:
        D, V = (-(-size // 8) * 8 for size in (head_dim, value_dim))
        if max(D, V) <= 128:
            return max(D, V), max(D, V)
        capability = self.device_capability()
        version = self.version or torch.backends.cudnn.version() or 0
        if capability is not None and capability[0] in (9, 10) and version >= _FIRST_WITH_192 and D <= 192 and V <= 128:
            return 192, 128
        return None


@once_per_table
def dense_calls_on(slices: Tensor, B: int, device: torch.device) -> tuple[VarlenCall, ...]:
    """Return one single-sequence call per rectangle or square in the table, on the device."""
    groups = []
    for q_start, q_stop, k_start, k_stop, causal in squares_and_rectangles(slices).tolist():
        work = np.array([[q_start, q_stop, k_start, k_stop, 0, 0, 0, 0]])  # the window replaces LO and HI
        groups.append(Group(UNBOUNDED, 0 if causal else UNBOUNDED, work))
    return tuple(call.on_device(B, device) for call in calls_of(groups))


@once_per_table
def squares_and_rectangles(slices: Tensor) -> ndarray:
    """Cut a table's work into rows (first query, last + 1, first key, last + 1, is causal); causal ones are square."""
    # In a slice with a lower bound, row i sees keys up to i − lo. That makes a rectangle (the first keys, seen by all
    # rows), then a triangle within a square, and below it another rectangle: rows that see all the triangle's keys.
    work = trimmed(slices)
    if (work[:, HI] < _FAR).any():
        raise ConfigError("parallel.kernel=cudnn does not support a window. Try parallel.kernel=auto.")
    pieces = []
    for q0, q1, k0, k1, lo in work[:, [Q_START, Q_STOP, K_START, K_STOP, LO]].tolist():
        if lo < -_FAR:
            pieces.append((q0, q1, k0, k1, False))
            continue
        diagonal_start = q0 - lo  # last key that the first row sees
        side = k1 - diagonal_start
        pieces += [
            (q0, q0 + side, diagonal_start, k1, True),
            (q0, q1, k0, diagonal_start, False),
            (q0 + side, q1, diagonal_start, k1, False),
        ]
    table = np.array(pieces, dtype=np.int64).reshape(-1, 5)
    return table[(table[:, 0] < table[:, 1]) & (table[:, 2] < table[:, 3])]


def _is_causal(call: VarlenCall) -> bool:
    """Return whether the call's mask is a triangle; it is square, so both corner alignments coincide."""
    return call.right != UNBOUNDED


def _by_heads(x_nHD: Tensor, length: int) -> Tensor:
    """View packed rows from equally long sequences as [B, H, length, D]."""
    return x_nHD.unflatten(0, (-1, length)).transpose(1, 2)


# --- one key, which the operator refuses ------------------------------------------------------------------------------


def _one_key(
    q_nHD: Tensor, k_mKD: Tensor, v_mKV: Tensor, call: VarlenCall, scores: ScoreRules
) -> tuple[Tensor, Tensor]:
    """Compute output and log-sum-exp for rows with a single key: its value and its score."""
    k_nHD, v_nHV = (_of_each_row(x, q_nHD, call) for x in (k_mKD, v_mKV))
    return v_nHV, (q_nHD.float() * k_nHD).sum(-1) * scores.scale


def _one_key_backward(
    dout_nHV: Tensor, qkv: ThreeTensors, result: tuple[Tensor, Tensor], call: VarlenCall, scores: ScoreRules
) -> tuple[Tensor, Tensor, Tensor, None]:
    (q_nHD, k_mKD, v_mKV), (out_nHV, lse_nH) = qkv, result
    k_nHD, v_nHV = (_of_each_row(x, q_nHD, call) for x in (k_mKD, v_mKV))
    dout = dout_nHV.float()
    score_nH = (q_nHD.float() * k_nHD).sum(-1) * scores.scale
    weight_nH = torch.exp(score_nH - lse_nH).float()
    dscore_nH = weight_nH * (dout * (v_nHV - out_nHV.float())).sum(-1) * scores.scale
    dk, dv = dscore_nH.unsqueeze(-1) * q_nHD.float(), weight_nH.unsqueeze(-1) * dout

    def of_key(grad_nHD: Tensor) -> Tensor:
        """Sum over a sequence's rows and over the query heads that share a key head."""
        shape = (-1, call.max_seqlen_q, k_mKD.shape[1], q_nHD.shape[1] // k_mKD.shape[1], grad_nHD.shape[-1])
        return grad_nHD.reshape(shape).sum((1, 3))

    return dscore_nH.unsqueeze(-1) * k_nHD, of_key(dk), of_key(dv), None


def _of_each_row(x_mKD: Tensor, q_nHD: Tensor, call: VarlenCall) -> Tensor:
    """Expand the single key to each query row and head in float32, [n, H, D]."""
    heads = x_mKD.float().repeat_interleave(q_nHD.shape[1] // x_mKD.shape[1], dim=1)
    return heads.repeat_interleave(call.max_seqlen_q, dim=0)

"""Stand-ins for the *compiled* modules of flash-attn 2 and 3 alone, for their own Python layers to call on CPUs.

They refuse what the libraries' C++ refuses (dtypes, strides, shapes, windows) and what its bindings would convert or
reject (types, number and order of arguments), and compute by definition in float64.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from tests.longctx.kernels.attention import flash_stand_in as definition

HALF = (torch.float16, torch.bfloat16)


def _check_types(kind: type, *values: object) -> None:
    for value in values:
        assert type(value) is kind, f"{value!r} is no {kind.__name__}"


def _check_half(*tensors: Tensor) -> None:
    assert tensors[0].dtype in HALF
    assert {x.dtype for x in tensors} == {tensors[0].dtype}
    assert all(x.stride(-1) == 1 for x in tensors)


class CompiledFlash2(ModuleType):
    """``flash_attn_2_cuda`` of 2.8.3: two of its functions, over packed sequences."""

    def __init__(self) -> None:
        super().__init__("flash_attn_2_cuda")

    def varlen_fwd(
        self, q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_seqlen_q,
        max_seqlen_k, dropout, scale, zero_tensors, causal, left, right, softcap, return_softmax, generator,
    ):  # fmt: skip
        assert all(x is None for x in (out, seqused_k, leftpad_k, block_table, alibi_slopes, generator)), (
            "nothing of ours uses this"
        )
        _check_types(int, max_seqlen_q, max_seqlen_k, left, right)
        _check_types(float, dropout, scale, softcap)
        _check_types(bool, zero_tensors, causal, return_softmax)
        assert (dropout, zero_tensors, return_softmax) == (0.0, False, False)
        _check_half(q, k, v)
        sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        window = left, right, softcap
        return list(definition.Flash2()._flash_attn_varlen_forward(q, k, v, *sequences, 0.0, scale, causal, *window))

    def varlen_bwd(
        self, dout, q, k, v, out, lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q,
        max_seqlen_k, dropout, scale, zero_tensors, causal, left, right, softcap, deterministic, generator, rng_state,
    ):  # fmt: skip
        assert alibi_slopes is None
        assert generator is None
        _check_types(int, max_seqlen_q, max_seqlen_k, left, right)
        _check_types(float, dropout, scale, softcap)
        _check_types(bool, zero_tensors, causal, deterministic)
        _check_half(dout, q, k, v, out, dq, dk, dv)
        tensors = dout, q, k, v, out, lse, dq, dk, dv
        sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        rest = left, right, softcap, None, deterministic
        definition.Flash2()._flash_attn_varlen_backward(*tensors, *sequences, 0.0, scale, causal, *rest)
        return [dq, dk, dv, torch.empty_like(lse)]


_FORWARD = (
    ("q k v", "Tensor", None),
    ("k_new:k_new! v_new:v_new! q_v out:out! cu_seqlens_q cu_seqlens_k cu_seqlens_k_new", "Tensor?", "None"),
    ("seqused_q seqused_k", "Tensor?", "None"),
    ("max_seqlen_q max_seqlen_k", "int?", "None"),
    ("page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary", "Tensor?", "None"),
    ("q_descale k_descale v_descale", "Tensor?", "None"),
    ("softmax_scale", "float?", "None"),
    ("is_causal", "bool", "False"),
    ("window_size_left window_size_right", "int", "-1"),
    ("attention_chunk", "int", "0"),
    ("softcap", "float", "0.0"),
    ("is_rotary_interleaved", "bool", "False"),
    ("scheduler_metadata", "Tensor?", "None"),
    ("num_splits", "int", "0"),
    ("pack_gqa", "bool?", "None"),
    ("sm_margin", "int", "0"),
)
_BACKWARD = (
    ("dout q k v out softmax_lse", "Tensor", None),
    ("dq:dq! dk:dk! dv:dv! cu_seqlens_q cu_seqlens_k seqused_q seqused_k", "Tensor?", "None"),
    ("max_seqlen_q max_seqlen_k", "int?", "None"),
    ("softmax_scale", "float?", "None"),
    ("is_causal", "bool", "False"),
    ("window_size_left window_size_right", "int", "-1"),
    ("softcap", "float", "0.0"),
    ("deterministic", "bool", "False"),
    ("sm_margin", "int", "0"),
)


def _schema(name: str, arguments: tuple, returns: str) -> str:
    """PyTorch's spelling of an operator's arguments; ``name:alias!`` is one that is written to."""
    parts = []
    for names, kind, default in arguments:
        for argument in names.split():
            argument, _, alias = argument.partition(":")
            typed = kind.replace("Tensor", f"Tensor({alias})") if alias else kind
            parts.append(f"{typed} {argument}" + ("" if default is None else f" = {default}"))
    return f"{name}({', '.join(parts)}) -> ({returns})"


def register_flash3() -> torch.library.Library:
    """Define ``torch.ops.flash_attn_3`` with the schema of flash-attn 3, as the import of its module does."""
    library = torch.library.Library("flash_attn_3", "DEF")
    gradients = "Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor"
    library.define(_schema("fwd", _FORWARD, "Tensor(out!), Tensor, Tensor, Tensor"))
    library.define(_schema("bwd", _BACKWARD, gradients))
    library.impl("fwd", _flash3_forward, "CPU")
    library.impl("bwd", _flash3_backward, "CPU")
    return library


def _rule_of_flash3(scale, causal, left, right, softcap, max_q, max_k):
    """The window as flash-attn 3 reads it: bounds that cut nothing off count as none."""
    left = -1 if left >= max_k - 1 else left
    right = -1 if right >= max_q - 1 else right
    if causal:
        right = 0
    return definition._Rule(
        scale=scale, left=None if left < 0 else left, right=None if right < 0 else right, softcap=softcap
    )


def _check_flash3(q, k, v, cu_q, cu_k, max_q, max_k):
    _check_half(q, k, v)
    definition._check(q, k, v, cu_q, cu_k, max_q, max_k, same_head=False)
    D, V = q.shape[-1], v.shape[-1]
    assert D == V or (128 < D <= 192 and 96 < V <= 128) or (D <= 64 and V <= 512)


def _flash3_forward(q, k, v, *rest):
    names = [argument.partition(":")[0] for names, _, _ in _FORWARD for argument in names.split()]
    given = dict(zip(names, (q, k, v, *rest), strict=False))
    used = {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale"}
    used |= {"is_causal", "window_size_left", "window_size_right", "softcap", "num_splits", "is_rotary_interleaved"}
    assert not any(value for name, value in given.items() if name not in used), "nothing of ours uses this"
    assert given["num_splits"] == 1
    lengths = given["max_seqlen_q"], given["max_seqlen_k"]
    cu = given["cu_seqlens_q"], given["cu_seqlens_k"]
    _check_flash3(q, k, v, *cu, *lengths)
    window = given["window_size_left"], given["window_size_right"], given["softcap"]
    rule = _rule_of_flash3(given["softmax_scale"], given["is_causal"], *window, *lengths)
    out, lse = definition._forward(q, k, v, *cu, rule)
    return out, lse, torch.empty(0), torch.empty(0)


def _flash3_backward(
    dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, seqused_q, seqused_k, max_q, max_k, scale, causal=False, left=-1,
    right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    assert seqused_q is None
    assert seqused_k is None
    assert not deterministic
    assert sm_margin == 0
    _check_half(dout, q, k, v, out, dq, dk, dv)
    _check_flash3(q, k, v, cu_q, cu_k, max_q, max_k)
    rule = _rule_of_flash3(scale, causal, left, right, softcap, max_q, max_k)
    found = definition._backward(dout, q, k, v, out, lse, cu_q, cu_k, rule)
    for given, x in zip((dq, dk, dv), found, strict=True):
        assert given.shape == x.shape
        given.copy_(x)
    return dq, dk, dv, *(torch.empty(0) for _ in range(5))

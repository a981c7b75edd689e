"""Each CUDA kernel that this machine has, against float64 attention. Needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longctx.kernels.attention import kernel_selection
from longctx.kernels.attention.bias import alibi_slopes
from longctx.kernels.attention.flash.varlen import VarlenKernel
from longctx.kernels.attention.kernel_interface import KernelRequest, RelativeBias, ScoreRules
from longctx.kernels.attention.reference import ReferenceKernel
from longctx.kernels.attention.slices import AttentionSlice, slice_table
from longctx.kernels.dtypes import accumulate_dtype

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

KERNELS = {name: kernel for name, kernel in kernel_selection.KERNELS.items() if isinstance(kernel, VarlenKernel)}
SLICES = {
    "causal": (AttentionSlice(0, 700, 0, 700, 0),),
    "full": (AttentionSlice(0, 700, 0, 700),),
    "window": (AttentionSlice(0, 700, 0, 700, 0, 99),),
    "both sides": (AttentionSlice(0, 700, 0, 700, -130, 250),),
    "packed": (
        AttentionSlice(0, 1, 0, 1, 0),
        AttentionSlice(1, 300, 1, 300, 0),
        AttentionSlice(300, 429, 300, 429, 0),
        AttentionSlice(429, 700, 429, 700, 0),
    ),
    "tall triangle": (AttentionSlice(0, 700, 0, 90, 0),),
    "tall upper triangle": (AttentionSlice(0, 700, 20, 60, None, 31),),
    "corner of a window": (AttentionSlice(0, 300, 100, 700, None, -150, 1, 600),),
    "blind rows": (AttentionSlice(3, 90, 0, 50), AttentionSlice(500, 601, 300, 480, 130)),
    "same rows twice": (AttentionSlice(0, 500, 0, 160, None, None, 1, 340), AttentionSlice(100, 500, 160, 500, 0)),
    "staircase": tuple(AttentionSlice(64 * n, 64 * n + 64, 0, 60 * n + 33, None, None, 1, 700 + n) for n in range(10)),
    "striped": (AttentionSlice(0, 700, 0, 700, 1, None, 4, -2),),
}
SHAPES = {"GQA 8/2, 128": (8, 2, 128, 128), "MHA 3/3, 64": (3, 3, 64, 64), "MQA 4/1, MLA": (4, 1, 192, 128)}


def tensors(H, K, D, V, dtype, *, rows=700, B=2):
    g = torch.Generator("cuda").manual_seed(0)
    shapes = ((B, rows, H, D), (B, rows, K, D), (B, rows, K, V), (B, rows, H, V))
    return [torch.randn(shape, generator=g, device="cuda").to(dtype) for shape in shapes]


def request(shape, dtype, **wishes):
    H, K, D, V = shape
    return KernelRequest("cuda", dtype, D, H, K, V, **wishes)


def skip_unless_supported(kernel, wanted):
    if why := kernel.supports(replace(wanted, deterministic=kernel.deterministic)):
        pytest.skip(f"{kernel.name}: {why}")


def attention(kernel, q, k, v, dout, slices, scores):
    """Output, log-sum-exp and gradients."""
    out, lse = kernel.forward(q, k, v, slice_table(slices), scores=scores)
    grads = kernel.backward(dout, q, k, v, out.to(q.dtype), lse, slice_table(slices), scores=scores)
    return out, lse, *(g for g in grads if g is not None)


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


def check(kernel, inputs, slices, scores):
    found = attention(kernel, *inputs, slices, scores)
    exact_scores = scores
    exact = attention(ReferenceKernel(), *(x.double() for x in inputs), slices, exact_scores)
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv", "dtable"), found, exact, strict=False):
        finite = torch.isfinite(want)
        assert torch.equal(torch.isfinite(got), finite), name
        assert got.dtype == (torch.float64 if name == "lse" else accumulate_dtype(inputs[0].dtype)), name
        bound = 1e-4 if name == "lse" else 1.5e-2 if inputs[0].dtype == torch.bfloat16 else 3e-3
        assert error(got[finite], want[finite]) < bound, f"{name}: {error(got[finite], want[finite]):.1e}"


@pytest.mark.parametrize("case", SLICES)
@pytest.mark.parametrize("name", KERNELS)
def test_masks(name, case):
    kernel, shape = KERNELS[name], SHAPES["GQA 8/2, 128"]
    has_window = any(one.hi is not None for one in SLICES[case])
    skip_unless_supported(kernel, request(shape, torch.bfloat16, window=has_window))
    check(kernel, tensors(*shape, torch.bfloat16), SLICES[case], ScoreRules(scale=shape[2] ** -0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("name", KERNELS)
def test_heads_and_dtypes(name, heads, dtype):
    kernel, shape = KERNELS[name], SHAPES[heads]
    skip_unless_supported(kernel, request(shape, dtype))
    check(kernel, tensors(*shape, dtype), SLICES["packed"], ScoreRules(scale=shape[2] ** -0.5))


@pytest.mark.parametrize("rule", ["softcap", "alibi", "relative_bias"])
@pytest.mark.parametrize("case", ["causal", "same rows twice", "corner of a window", "striped"])
@pytest.mark.parametrize("name", KERNELS)
def test_score_rules(name, case, rule):
    kernel, shape = KERNELS[name], SHAPES["GQA 8/2, 128"]
    skip_unless_supported(kernel, request(shape, torch.bfloat16, rules=(rule,)))
    table = torch.randn(32, shape[0], device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    scores = {
        "softcap": ScoreRules(scale=1.0, softcap=5.0),
        "alibi": ScoreRules(scale=shape[2] ** -0.5, alibi_slopes_H=alibi_slopes(shape[0]).cuda()),
        "relative_bias": ScoreRules(scale=shape[2] ** -0.5, relative_bias=RelativeBias(table)),
    }[rule]
    check(kernel, tensors(*shape, torch.bfloat16), SLICES[case], scores)


@pytest.mark.parametrize("name", KERNELS)
def test_repetition(name):
    """Deterministic kernels give equal bits again; forward does so everywhere."""
    kernel, shape = KERNELS[name], SHAPES["GQA 8/2, 128"]
    skip_unless_supported(kernel, request(shape, torch.bfloat16))
    inputs, scores = tensors(*shape, torch.bfloat16), ScoreRules(scale=0.1)
    first, second = (attention(kernel, *inputs, SLICES["staircase"], scores) for _ in range(2))
    same = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    assert all(same) if kernel.deterministic else all(same[:2])


def test_library_refuses_nothing_it_was_said_to_take():
    """Head sizes between the kernels' own, one row, one key."""
    for kernel in KERNELS.values():
        for shape in ((4, 2, 40, 40), (4, 2, 100, 36), (2, 1, 256, 256)):
            if kernel.supports(request(shape, torch.bfloat16, deterministic=kernel.deterministic)) is None:
                check(
                    kernel,
                    tensors(*shape, torch.bfloat16, rows=130),
                    (AttentionSlice(0, 130, 0, 130, 0),),
                    ScoreRules(scale=0.1),
                )
        shape = (4, 2, 64, 64)
        if kernel.supports(request(shape, torch.bfloat16, deterministic=kernel.deterministic)) is None:
            for slices in (
                (AttentionSlice(0, 1, 0, 1),),
                (AttentionSlice(5, 6, 0, 130),),
                (AttentionSlice(0, 130, 7, 8),),
            ):
                check(kernel, tensors(*shape, torch.bfloat16, rows=130), slices, ScoreRules(scale=0.1))

"""The CPU flash kernel: how exact it is, what it computes in, which memory it takes."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from longctx.errors import ConfigError
from longctx.kernels.attention import cpu_flash
from longctx.kernels.attention.blockwise import BlockwiseKernel
from longctx.kernels.attention.cpu_flash import CpuFlashKernel
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.kernels.attention.reference import ReferenceKernel
from longctx.kernels.attention.slices import AttentionSlice
from tests.longctx.kernels.attention.kernel_cases import SCALE, SLICES, forward_backward, relative_error, rules, tensors
from tests.rounding import both_ways, rounded

NAMES = ("out", "dq", "dk", "dv")
BANDS = {  # several tiles a row
    "causal": AttentionSlice(0, 2300, 0, 2300, lo=0),
    "later queries": AttentionSlice(0, 2300, 0, 2300, lo=-700),
    "full": AttentionSlice(5, 2300, 1, 2000),
    "window": AttentionSlice(0, 2300, 0, 2300, lo=0, hi=1023),
}


@pytest.mark.parametrize("name", BANDS)
def test_float32_is_more_exact_than_the_op_it_is_made_of(name):
    one, scores = BANDS[name], ScoreRules(scale=32**-0.5)
    inputs = tensors(2300, 2300, H=1, K=1, D=32, B=1)
    dout = torch.randn(1, 2300, 1, 32, generator=torch.Generator().manual_seed(1))
    exact = forward_backward(ReferenceKernel(), [x.double() for x in inputs], dout.double(), [one], scores)
    for kernel in (CpuFlashKernel(), BlockwiseKernel()):
        ours = forward_backward(kernel, inputs, dout, [one], scores)
        for tensor, got, want in zip(NAMES, ours, exact, strict=True):
            error = relative_error(got, want)
            assert error <= 5e-7, f"{kernel.name}, {tensor}: {error:.1e}"  # one process's SDPA shows 4e-7 to 5e-7


@both_ways
def test_bfloat16_is_more_exact_than_the_op(products):
    """Query heads that share a key head are where the op loses most.

    In float32 results are rounded once at the end; gradients depend on the rounded output besides. Natively forward and
    the queries' gradients are the op's own. It adds up the gradients of keys and values in bfloat16, we those of query
    heads in float32: that leaves out some of its roundings and adds none. How many it makes, the processor decides.
    """
    q, k, v = tensors(1024, 1024, torch.bfloat16, H=8, K=2, D=16, B=1)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    heads = [x.transpose(1, 2) for x in leaves]
    out = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True, enable_gqa=True)
    plain = [out.transpose(1, 2), *torch.autograd.grad(out, leaves, dout.transpose(1, 2))]
    work = [AttentionSlice(0, 1024, 0, 1024, lo=0)], ScoreRules(scale=0.25)
    exact = forward_backward(ReferenceKernel(), [x.double() for x in (q, k, v)], dout.double(), *work)
    theirs = {n: relative_error(a, b) for n, a, b in zip(NAMES, plain, exact, strict=True)}
    ours = forward_backward(CpuFlashKernel(products), [q, k, v], dout, *work)
    error = {n: relative_error(a.bfloat16(), b) for n, a, b in zip(NAMES, ours, exact, strict=True)}
    assert error["out"] <= 1.02 * theirs["out"]
    assert error["dq"] <= 1.02 * theirs["dq"]
    assert error["dk"] < theirs["dk"]
    assert error["dv"] < theirs["dv"]
    if products == "float32":
        assert error["out"] <= rounded(1)
        assert max(error[name] for name in NAMES[1:]) <= rounded(2)


def test_what_bfloat16_is_computed_in(monkeypatch, caplog):
    for fastest, expected in (("native", torch.bfloat16), ("float32", torch.float32)):
        cpu_flash._compute_dtype.cache_clear()
        monkeypatch.setattr(cpu_flash, "fastest_matmul_mode", lambda fastest=fastest: fastest)
        with caplog.at_level(logging.INFO):
            for _ in range(2):
                assert cpu_flash._compute_dtype(torch.bfloat16, "auto") == expected
        assert cpu_flash._compute_dtype(torch.float16, "auto") == torch.float32
        assert cpu_flash._compute_dtype(torch.float16, "native") == torch.float16
        assert cpu_flash._compute_dtype(torch.float32, "native") == torch.float32
    cpu_flash._compute_dtype.cache_clear()
    said = [r.message for r in caplog.records if "bfloat16" in r.message]
    assert len(said) == 2
    assert "no bfloat16 instructions" in said[1]
    with pytest.raises(ConfigError, match="compute='bf16' is unknown"):
        CpuFlashKernel("bf16")


@pytest.fixture
def nan_in_fresh_memory():
    """Memory that nothing was written to holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_rows_never_written_stay_out_of_merges(nan_in_fresh_memory):
    assert torch.empty(3).isnan().all()
    q, k, v = tensors(20, 20)
    for kernel in (CpuFlashKernel(), BlockwiseKernel()):
        for slices in SLICES.values():
            results = forward_backward(kernel, [q, k, v], q, slices, ScoreRules(scale=SCALE))
            assert all(x.isfinite().all() for x in results)


class _Largest(TorchDispatchMode):
    """Notes the largest memory, in bytes, that any operation's result takes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        taken = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in results if isinstance(results, tuple | list) else [results]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in taken:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return results


@pytest.mark.parametrize(
    ("kernel", "limit"),
    [
        (BlockwiseKernel(), 4 * 2 * 512 * (512 + 512)),
        (CpuFlashKernel("float32"), 4 * 1024 * 1024),
        (CpuFlashKernel("native"), 4 * 1024 * 1024),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_memory_does_not_grow_with_the_square(kernel, limit):
    """No tensor is larger than the documented tile, or than an input in partial precision, whatever the length."""
    for S, one in (
        (1700, AttentionSlice(0, 1700, 0, 1700, lo=0)),
        (2900, AttentionSlice(0, 2900, 0, 2900, lo=0, hi=1500)),
    ):
        q, k, v = tensors(S, S, torch.bfloat16, H=2, K=1, D=4, B=1)
        scores = rules(2, torch.float32)["all"] if kernel.name == "blockwise" else ScoreRules(scale=0.5)
        with _Largest() as largest:
            forward_backward(kernel, [q, k, v], q, [one], scores)
        assert largest.bytes <= max(limit, 8 * S * 2 * 4)


@pytest.mark.parametrize("threads", [1, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value_dim", [8, 6])
def test_newest_tokens_in_one_call(threads, dtype, value_dim, monkeypatch):
    """Heads that share keys are rows of one head, or with more threads than key heads each is by itself."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    g = torch.Generator().manual_seed(0)
    q = torch.randn(3, 1, 6, 8, generator=g, dtype=torch.float64)
    k, v = (torch.randn(3, 11, 2, size, generator=g, dtype=torch.float64) for size in (8, value_dim))
    bias, sinks = torch.zeros(3, 1, 1, 11), torch.randn(6, generator=g, dtype=torch.float64)
    bias[1, ..., 4:] = -torch.inf
    for bias_N11s, sinks_H in ((None, None), (bias, None), (bias, sinks)):
        kernel, inputs = CpuFlashKernel("float32"), (x.to(dtype) for x in (q, k, v))
        found = kernel.forward_newest(*inputs, bias_N11s, scores=ScoreRules(scale=SCALE), sinks_H=sinks_H)
        score = torch.einsum("nqhd,nshd->nhs", q, k.repeat_interleave(3, 2)) * SCALE
        if bias_N11s is not None:
            score = score + bias_N11s[:, 0]
        if sinks_H is not None:
            score = torch.cat((score, sinks_H.expand(3, 6)[..., None]), dim=-1)
        wanted = torch.einsum("nhs,nshv->nhv", score.softmax(-1)[..., :11], v.repeat_interleave(3, 2))
        assert found.shape == (3, 1, 6, value_dim)
        assert relative_error(found[:, 0].double(), wanted) < {torch.bfloat16: 1e-2}.get(dtype, 1e-6)

"""The kernels as operators: what PyTorch asks of an operator, and the table of slices passed on as it is."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from longctx.kernels.attention import ops
from longctx.kernels.attention.kernel_interface import Gradients, RelativeBias, ScoreRules
from longctx.kernels.attention.kernel_selection import KERNELS
from longctx.kernels.attention.slices import AttentionSlice, slice_table

TABLE = slice_table(
    [
        AttentionSlice(0, 6, 0, 6, lo=0),
        AttentionSlice(6, 12, 6, 12, lo=0, hi=3),
        AttentionSlice(8, 12, 6, 8, lo=4, step=2, offset=-1),
    ]
)


def arguments(kernel: str, *, dtype=torch.float32, V=8, scores=None):
    """Inputs of both operators: ``forward``'s, and ``backward``'s with results of ``forward``."""
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, 12, h, d, generator=g).to(dtype) for h, d in ((4, 8), (2, 8), (2, V), (4, V)))
    rest = ops._plain(TABLE, kernel, scores or ScoreRules(scale=0.3))
    out, lse = torch.ops.longctx.attention_forward(q, k, v, *rest)
    return (q, k, v, *rest), (dout, q, k, v, out.to(dtype), lse, *rest)


def rich_scores(table_dtype=torch.float32) -> ScoreRules:
    g = torch.Generator().manual_seed(1)
    bias = RelativeBias(torch.randn(6, 4, generator=g).to(table_dtype), 9, bidirectional=True)
    return ScoreRules(scale=0.3, softcap=2.0, alibi_slopes_H=torch.rand(4, generator=g), relative_bias=bias)


CASES = {
    "float32": ("cpu_flash", {}),
    "bfloat16, native": ("cpu_flash_native", {"dtype": torch.bfloat16}),
    "bfloat16 in float32": ("cpu_flash_float32", {"dtype": torch.bfloat16}),
    "float64": ("reference", {"dtype": torch.float64}),
    "rich": ("blockwise", {"V": 5, "scores": rich_scores()}),
}


@pytest.mark.parametrize("case", CASES)
def test_operators_keep_pytorchs_rules(case):
    """Nothing mutated or aliased, and the fake implementation tells shapes, dtypes and strides of the real one."""
    kernel, changes = CASES[case]
    forward, backward = arguments(kernel, **changes)
    tests = ("test_schema", "test_faketensor") + (("test_aot_dispatch_dynamic",) if case == "rich" else ())
    opcheck(torch.ops.longctx.attention_forward.default, forward, test_utils=tests)
    opcheck(torch.ops.longctx.attention_backward.default, backward, test_utils=tests)


@pytest.mark.parametrize("case", CASES)
def test_operators_return_what_the_kernels_return(case):
    name, changes = CASES[case]
    (q, k, v, *_), (dout, *_, out, lse) = (x[:6] for x in arguments(name, **changes))
    scores, kernel = changes.get("scores", ScoreRules(scale=0.3)), KERNELS[name]
    through = ops.forward(name, q, k, v, TABLE, scores=scores)
    torch.testing.assert_close(through, kernel.forward(q, k, v, TABLE, scores=scores), rtol=0, atol=0)
    grads = ops.backward(name, dout, q, k, v, out, lse, TABLE, scores=scores)
    wanted = kernel.backward(dout, q, k, v, out, lse, TABLE, scores=scores)
    assert (grads.dbias_table_NH is None) == (scores.relative_bias is None)
    for got, want in zip(grads, wanted, strict=True):
        if want is not None:
            assert torch.equal(got, want.to(got.dtype))


def test_the_kernel_gets_the_very_table(monkeypatch):
    """What kernels remember of a table is found again in the other pass and in other layers."""
    seen = []

    class Listening:
        def forward(self, q, k, v, slices, *, scores):
            seen.append(slices)
            return q.float(), q.new_zeros(q.shape[:-1], dtype=torch.float64)

        def backward(self, dout, q, k, v, out, lse, slices, *, scores):
            seen.append(slices)
            return Gradients(q.float(), k.float(), v.float())

    monkeypatch.setitem(ops.KERNELS, "listening", Listening())
    (q, k, v, *_), (dout, *_, out, lse) = (x[:6] for x in arguments("cpu_flash"))
    ops.forward("listening", q, k, v, TABLE, scores=ScoreRules(scale=0.3))
    ops.backward("listening", dout, q, k, v, out, lse, TABLE, scores=ScoreRules(scale=0.3))
    assert seen[0] is TABLE
    assert seen[1] is TABLE

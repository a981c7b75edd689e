"""Every kernel that runs on a CPU × dtype × slices × score rules × shapes, held against the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longctx.errors import ConfigError
from longctx.kernels.attention import attention_tiles, blockwise, cpu_flash
from longctx.kernels.attention.bias import buckets
from longctx.kernels.attention.blockwise import BlockwiseKernel
from longctx.kernels.attention.cpu_flash import CpuFlashKernel
from longctx.kernels.attention.kernel_interface import KernelRequest, RelativeBias, ScoreRules
from longctx.kernels.attention.reference import ReferenceKernel
from longctx.kernels.attention.slices import AttentionSlice, slice_table
from longctx.kernels.dtypes import accumulate_dtype
from tests.longctx.kernels.attention.kernel_cases import (
    SLICES,
    band_matrix,
    distance_matrix,
    plain_attention,
    rules,
    tensors,
)
from tests.rounding import UNIT

KERNELS = {
    "reference": ReferenceKernel(),
    "blockwise": BlockwiseKernel(),
    "cpu_flash": CpuFlashKernel("float32"),
    "cpu_flash, native": CpuFlashKernel("native"),
}
SHAPES = {  # query heads, key heads, head size, value head size, rows of the batch
    "shared keys": (4, 2, 8, 8, 2),
    "one key head, wide keys": (3, 1, 6, 4, 1),
    "wide values": (2, 2, 1, 5, 2),
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 10 * UNIT, torch.float16: 10 * 2.0**-11}
"""Most that a value may be off: of its own size, and of 1 or an eighth of the largest there is, since values around 1
may cancel. Of 16-bit inputs it is ten units, each the most that one rounding changes a value by:

* In float32 the output that backward is given is rounded. A score's gradient takes away its product with the output's
  gradient, 4 to 8 products of values around 1 that are off to either side: 3 or 4 units in the worst of thousands; the
  gradient of a bias is the sum of many of these, and they cancel.
* Natively scores are rounded besides (of sizes up to 3: 3 units of a weight), weights or the gradients of scores, their
  products with keys, queries or values, and sums over tiles: 6 units, if all fell to one side.
"""


@pytest.fixture
def tile_size(request, monkeypatch):
    """Twenty rows are one tile, unless tiles are made small."""
    if request.param == "small tiles":
        for module, name, size in (
            (attention_tiles, "_NARROW", 2),
            (attention_tiles, "_MAX_MASKED_TILE", 6),
            (blockwise, "_TILE", 6),
            (cpu_flash, "_TILE", 6),
            (cpu_flash, "_GRADIENT_TILE", 9),
            (cpu_flash, "_ELEMENTS", 64),
        ):
            monkeypatch.setattr(module, name, size)
    return request.param


def check(
    kernel, dtype: torch.dtype, slices: list[AttentionSlice], scores: ScoreRules, shape: tuple, *, sinks: bool = False
) -> None:
    """Output, log-sum-exp and every gradient of a kernel against the definition's."""
    H, K, D, V, B = shape
    q, k, v = tensors(20, 20, dtype, H=H, K=K, D=D, V=V, B=B)
    k = torch.cat((k, k), -1)[..., :D]  # rows of k and v lie differently far apart, as in views of one projection
    leaves = [x.double().clone().requires_grad_() for x in (q, k, v)]
    wanted_scores = scores
    if scores.relative_bias is not None:
        leaves.append(scores.relative_bias.table_NH.double().clone().requires_grad_())
        wanted_scores = replace(scores, relative_bias=replace(scores.relative_bias, table_NH=leaves[3]))
    seen, distances = band_matrix(slices, 20, 20), distance_matrix(slices, 20, 20)
    want_out, want_lse = plain_attention(leaves[0], leaves[1], leaves[2], seen, wanted_scores, distances)
    out, lse = kernel.forward(q, k, v, slice_table(slices), scores=scores)
    got = [out, lse]
    if sinks:  # a logit without a value takes a share of every row
        want_total = torch.logaddexp(want_lse, torch.full_like(want_lse, 0.7))
        want_out = want_out * torch.exp(want_lse - want_total).unsqueeze(-1)
        total = torch.logaddexp(lse, torch.full_like(lse, 0.7))
        out, lse = out * torch.exp(lse - total).unsqueeze(-1).to(out.dtype), total
        got[0] = out
    dout = torch.randn(want_out.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    grads = kernel.backward(dout, q, k, v, out.to(dtype), lse, slice_table(slices), scores=scores)
    wanted = torch.autograd.grad(want_out, leaves, dout.double(), allow_unused=True, materialize_grads=True)
    assert {x.dtype for x in (got[0], *grads[:3])} == {accumulate_dtype(dtype)}
    assert got[1].dtype == torch.float64
    assert (grads.dbias_table_NH is None) == (scores.relative_bias is None)
    tolerance = TOLERANCE[dtype]
    for x, want in zip((*got, *grads), (want_out, want_lse, *wanted), strict=False):
        torch.testing.assert_close(
            x.double(),
            want,
            atol=tolerance
            * max(1, float(want.detach()[want.isfinite()].abs().amax()) / 8 if want.isfinite().any() else 1),
            rtol=tolerance,
        )


def cases(names, dtypes) -> list[tuple]:
    """Small tiles for every dtype, whole ones for one; the reference has no tiles."""
    whole = [(n, torch.float32, "whole") for n in names if n != "reference"]
    tiled = [(n, d, "whole" if n == "reference" else "small tiles") for n in names for d in dtypes]
    return whole + [(n, d, size) for n, d, size in tiled if "native" not in n or d.itemsize == 2]


@pytest.mark.parametrize(("name", "dtype", "tile_size"), cases(KERNELS, TOLERANCE), indirect=["tile_size"], ids=str)
def test_slices_against_definition(name, dtype, tile_size):
    for slices in SLICES.values():
        check(KERNELS[name], dtype, slices, ScoreRules(scale=0.3), SHAPES["shared keys"])


@pytest.mark.parametrize(
    ("name", "dtype", "tile_size"), cases(KERNELS, [torch.float64, torch.bfloat16]), indirect=["tile_size"], ids=str
)
def test_shapes_and_sinks_against_definition(name, dtype, tile_size):
    for shape in SHAPES.values():
        for slices in (SLICES["causal"], SLICES["wide window"], SLICES["blind rows"]):
            check(KERNELS[name], dtype, slices, ScoreRules(scale=0.3), shape, sinks=True)


@pytest.mark.parametrize(
    ("name", "dtype", "tile_size"),
    cases(["reference", "blockwise"], [torch.float64, torch.bfloat16]),
    indirect=["tile_size"],
    ids=str,
)
@pytest.mark.parametrize("rule", ["softcap", "alibi", "bias", "all"])
def test_scores_against_definition(name, dtype, rule, tile_size):
    for case in ("causal", "later queries", "sinks and window", "striped, with window", "none"):
        for shape in SHAPES.values():
            check(KERNELS[name], dtype, SLICES[case], rules(shape[0], dtype)[rule], shape)


@pytest.mark.parametrize("rule", ["softcap", "alibi", "bias"])
def test_cpu_flash_refuses_what_it_cannot(rule):
    q, k, v = tensors(3, 3)
    scores = rules(4)[rule]
    request = KernelRequest("cpu", q.dtype, 8, 4, 2, rules=scores.rules)
    assert "blockwise has" in (KERNELS["cpu_flash"].supports(request) or "")
    with pytest.raises(ConfigError, match="blockwise"):
        KERNELS["cpu_flash"].forward(q, k, v, slice_table([AttentionSlice(0, 3, 0, 3)]), scores=scores)


@pytest.mark.parametrize("name", ["reference", "blockwise"])
@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (ScoreRules(scale=1, softcap=0.0), "softcap=0.0 must be above 0"),
        (ScoreRules(scale=1, alibi_slopes_H=torch.ones(3)), "for 4 query heads"),
        (ScoreRules(scale=1, relative_bias=RelativeBias(torch.ones(32, 3))), r"expected \[buckets, 4\]"),
        (ScoreRules(scale=1, relative_bias=RelativeBias(torch.ones(1, 4))), "at least 2"),
        (ScoreRules(scale=1, relative_bias=RelativeBias(torch.ones(7, 4), bidirectional=True)), "an even number"),
        (ScoreRules(scale=1, relative_bias=RelativeBias(torch.ones(32, 4), max_distance=16)), "must exceed 16"),
    ],
)
def test_scores_that_make_no_sense(name, scores, message):
    q, k, v = tensors(3, 3)
    with pytest.raises(ConfigError, match=message):
        KERNELS[name].forward(q, k, v, slice_table([AttentionSlice(0, 3, 0, 3)]), scores=scores)


@pytest.mark.parametrize("D", [1, 7, 63, 65, 257])
@pytest.mark.parametrize("name", ["cpu_flash", "cpu_flash, native", "blockwise"])
def test_odd_head_sizes(name, D):
    for dtype in (torch.float32, torch.bfloat16):
        check(KERNELS[name], dtype, SLICES["window"], ScoreRules(scale=D**-0.5), (2, 1, D, D, 1))


@pytest.mark.parametrize("name", KERNELS)
def test_rows_of_strided_views_and_empty_tensors(name):
    kernel, scores = KERNELS[name], ScoreRules(scale=0.3)
    qkv = torch.randn(1, 24, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, k, v = qkv[:, 2:22, :4], qkv[:, 4:, 4:6], qkv[:, 4:, 6:]
    slices = [AttentionSlice(0, 20, 0, 20, lo=0, hi=7)]
    found = kernel.forward(q, k, v, slice_table(slices), scores=scores)
    torch.testing.assert_close(
        found, kernel.forward(q.clone(), k.clone(), v.clone(), slice_table(slices), scores=scores)
    )
    out, lse = kernel.forward(q[:, :0], k, v, slice_table([]), scores=scores)
    assert out.shape == (1, 0, 4, 8)
    assert kernel.backward(out, q[:, :0], k, v, out, lse, slice_table([]), scores=scores).dk_BsKD.abs().sum() == 0


@pytest.mark.parametrize("name", ["cpu_flash", "blockwise"])
def test_equal_bits_on_repetition(name):
    kernel, slices, scores = KERNELS[name], [AttentionSlice(0, 700, 0, 700, lo=0)], ScoreRules(scale=0.3)
    if name == "blockwise":
        scores = rules(4, torch.float32)["all"]
    q, k, v = tensors(700, 700)
    out, lse = kernel.forward(q, k, v, slice_table(slices), scores=scores)
    runs = [kernel.backward(out, q, k, v, out, lse, slice_table(slices), scores=scores) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True) if a is not None)


@pytest.mark.parametrize(("name", "dtype", "tile_size"), cases(KERNELS, []), indirect=["tile_size"], ids=str)
def test_keys_outside_the_band_weigh_exactly_nothing(name, dtype, tile_size):
    q, k, v = tensors(20, 20, dtype)
    v[:, 12:] = 1e30
    dout = torch.ones_like(q).index_fill(
        1, torch.arange(12, 20), 0
    )  # no row that sees those values asks for a gradient
    slices, scores = [AttentionSlice(0, 20, 0, 20, lo=0)], ScoreRules(scale=0.3)
    out, lse = KERNELS[name].forward(q, k, v, slice_table(slices), scores=scores)
    assert out[:, :12].abs().max() < 10
    grads = KERNELS[name].backward(dout, q, k, v, out, lse, slice_table(slices), scores=scores)
    assert grads.dk_BsKD[:, 12:].abs().max() == grads.dv_BsKV[:, 12:].abs().max() == 0


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (32, 1000), (8, 20), (4, 17)])
def test_buckets_are_t5s(num_buckets, max_distance, bidirectional):
    attention = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    distances = torch.arange(-1200, 1200)
    bias = RelativeBias(torch.zeros(num_buckets, 2), max_distance, bidirectional)
    theirs = attention._relative_position_bucket(-distances, bidirectional, num_buckets, max_distance)
    assert torch.equal(buckets(distances, bias), theirs)

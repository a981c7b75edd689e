"""Adapters of CUDA kernels against attention by definition, on stand-ins that have the libraries' signatures."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from longctx.errors import ConfigError
from longctx.kernels.attention import kernel_selection, ops
from longctx.kernels.attention.flash import flex
from longctx.kernels.attention.flash.adapter import FlashKernel
from longctx.kernels.attention.flash.cudnn import CudnnKernel
from longctx.kernels.attention.flash.flex import FlexKernel
from longctx.kernels.attention.flash.libraries import CUDA_FLASH, FLASH2, FLASH3, FLASH4
from longctx.kernels.attention.flash.varlen import calls_on
from longctx.kernels.attention.kernel_interface import KernelRequest, RelativeBias, ScoreRules, merge_
from longctx.kernels.attention.slices import AttentionSlice, slice_table
from tests.longctx.kernels.attention import flash_stand_in, kernel_cases

HOPPER = (9, 0)
LIBRARIES = {library.name: library for library in (FLASH2, FLASH3, FLASH4, CUDA_FLASH)}
T, H, SCALE = 30, 4, kernel_cases.SCALE

KERNELS = {
    "flash2": lambda: FlashKernel(FLASH2, flash_stand_in.Flash2(), capability=HOPPER),
    "flash4": lambda: FlashKernel(FLASH4, flash_stand_in.Flash4(), capability=HOPPER),
    "cuda_flash": lambda: FlashKernel(CUDA_FLASH, flash_stand_in.Aten(), capability=HOPPER),
    "flex": lambda: FlexKernel(flash_stand_in.flex, capability=HOPPER),
}


def packed(*lengths, hi=None):
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return [AttentionSlice(a, b, a, b, 0, hi) for a, b in pairwise(starts)]


SLICES = kernel_cases.SLICES | {
    "causal": packed(30),
    "full": [AttentionSlice(0, 30, 0, 30)],
    "packed": packed(1, 11, 7, 1, 10),
    "packed window": packed(1, 11, 7, 1, 10, hi=5),
    "tall triangle": [AttentionSlice(0, 30, 0, 4, 0)],
    "tall upper triangle": [AttentionSlice(0, 30, 2, 6, None, 1)],
    "corner of a window": [AttentionSlice(0, 12, 3, 30, None, -10, 1, 27)],
    "staircase": [AttentionSlice(4 * n, 4 * n + 4, 0, 3 * n + 2, None, None, 1, 20 + 5 * n) for n in range(7)],
    "window over chunks": [
        AttentionSlice(q, q + 5, k, k + 5, -o, 6 - o, 1, o)
        for q in range(0, 30, 5)
        for k in range(0, q + 1, 5)
        for o in [2 * (q - k) + 5 - (q - k)]
    ],
}


def check(kernel, slices, scores=None, *, K=2, D=8, V=None, B=2):
    """Forward, and backward in two visits with the global output and log-sum-exp, against the definition."""
    scores = scores or ScoreRules(scale=SCALE)
    q, k, v = kernel_cases.tensors(T, T, torch.float64, H=H, K=K, D=D, V=V, B=B)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    exact = scores
    if scores.relative_bias is not None:
        leaves.append(scores.relative_bias.table_NH.double().requires_grad_())
        exact = replace(scores, relative_bias=replace(scores.relative_bias, table_NH=leaves[3]))
    seen, distances = (of(slices, T, T) for of in (kernel_cases.band_matrix, kernel_cases.distance_matrix))
    wanted = kernel_cases.plain_attention(*leaves[:3], seen, exact, distances)
    dout = torch.randn(wanted[0].shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    half = (len(slices) + 1) // 2
    visits = [slice_table(slices[:half]), slice_table(slices[half:])]
    out, lse = torch.zeros_like(wanted[0]), torch.full_like(wanted[1], -torch.inf)
    for visit in visits:
        merge_(out, lse, *kernel.forward(q, k, v, visit, scores=scores))
    whole = kernel.forward(q, k, v, slice_table(slices), scores=scores)
    for got in (whole, (out, lse)):
        assert got[0].dtype == got[1].dtype == torch.float64
        torch.testing.assert_close(got, tuple(x.detach() for x in wanted), atol=2e-6, rtol=2e-6)
    parts = [kernel.backward(dout, q, k, v, *whole, visit, scores=scores) for visit in visits]
    for n, want in enumerate(torch.autograd.grad(wanted[0], leaves, dout)):
        got = sum(part[n] for part in parts)
        torch.testing.assert_close(got.double(), want, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("case", SLICES)
@pytest.mark.parametrize("name", KERNELS)
def test_masks(name, case):
    check(KERNELS[name](), SLICES[case])


SLOPES = torch.tensor([0.5, 0.25, 0.11, 0.0])


@pytest.mark.parametrize("case", SLICES)
def test_alibi(case):
    check(KERNELS["flex"](), SLICES[case], ScoreRules(scale=SCALE, alibi_slopes_H=SLOPES))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(
    "case", ["causal", "window on both sides", "packed", "staircase", "striped, with window", "blind rows"]
)
def test_relative_bias(case, bidirectional):
    table = torch.randn(8, H, generator=torch.Generator().manual_seed(1))
    bias = RelativeBias(table, max_distance=12, bidirectional=bidirectional)
    check(KERNELS["flex"](), SLICES[case], ScoreRules(scale=SCALE, relative_bias=bias, softcap=2.0))


@pytest.mark.parametrize("name", ["flash2", "flash4", "flex"])
def test_softcap(name):
    check(KERNELS[name](), SLICES["packed window"], ScoreRules(scale=2.0, softcap=1.5))
    if name == "flex":  # which has what comes behind the cap too
        check(KERNELS[name](), SLICES["later queries"], ScoreRules(scale=2.0, softcap=1.5, alibi_slopes_H=SLOPES))


@pytest.mark.parametrize("name", ["flash2", "flash4", "cuda_flash", "cudnn"])
def test_rules_that_a_kernel_lacks_are_refused_by_the_call_too(name):
    q, kernel = torch.randn(1, 4, 1, 8), {**KERNELS, "cudnn": CudnnKernel}[name]()
    scores = ScoreRules(scale=1.0, alibi_slopes_H=torch.ones(1))
    with pytest.raises(ConfigError, match=f"{name} does not support ALiBi"):
        kernel.forward(q, q, q, slice_table([AttentionSlice(0, 4, 0, 4)]), scores=scores)


@pytest.mark.parametrize("name", KERNELS)
def test_heads_and_sizes(name):
    """Multi-query and multi-head attention; heads that are no multiple of 8; values smaller and larger than keys."""
    for K, D, V, B in ((1, 8, 8, 1), (4, 5, 5, 1), (2, 24, 16, 3), (2, 8, 13, 1)):
        check(KERNELS[name](), SLICES["packed"], K=K, D=D, V=V, B=B)
    check(KERNELS[name](), SLICES["causal"], D=192, V=128, B=1)


@pytest.mark.parametrize("name", KERNELS)
def test_half_precision_comes_back_in_float32(name):
    """But for gradients of which every row is of one call: what the library has rounded is not made wider."""
    kernel, g = KERNELS[name](), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 12, h, 8, generator=g).bfloat16() for h in (4, 2, 2))
    one, two = (AttentionSlice(0, 12, 0, 12, 0),), (AttentionSlice(0, 12, 0, 6, 0), AttentionSlice(0, 12, 6, 12, -6))
    found = []
    for slices in (one, two):
        table = slice_table(slices)
        out, lse = kernel.forward(q, k, v, table, scores=ScoreRules(scale=SCALE))
        grads = kernel.backward(out, q, k, v, out, lse, table, scores=ScoreRules(scale=SCALE))
        assert out.dtype == torch.float32
        assert lse.dtype == torch.float64
        found.append([x.dtype for x in grads[:3]])
        assert {x.dtype for x in grads.widened()[:3]} == {torch.float32}
    assert set(found[0]) <= {torch.float32, torch.bfloat16}
    assert found[1] == [torch.float32] * 3


def test_one_call_for_all_documents():
    library = flash_stand_in.Flash2()
    q, k, v = torch.randn(1, 300, 1, 8), torch.randn(1, 300, 1, 8), torch.randn(1, 300, 1, 8)
    FlashKernel(FLASH2, library, capability=HOPPER).forward(
        q, k, v, slice_table(packed(*([3] * 100), hi=1)), scores=ScoreRules(scale=1.0)
    )
    assert library.calls == 1


def test_deterministic_is_passed_on():
    for wanted in (False, True):
        library = flash_stand_in.Flash2()
        kernel = FlashKernel(FLASH2, library, capability=HOPPER, deterministic=wanted)
        q = torch.randn(1, 4, 1, 8)
        kernel.backward(
            q, q, q, q, q, torch.zeros(1, 4, 1), slice_table([AttentionSlice(0, 4, 0, 4)]), scores=ScoreRules(scale=1.0)
        )
        assert library.deterministic == wanted
        assert kernel.name == ("flash2_deterministic" if wanted else "flash2")


def test_flex_mask_blocks_over_long_rows():
    """Several 128-row blocks: whole ones inside, partial ones at the edges, none outside."""
    slices, g = (*packed(300, 84, hi=150), AttentionSlice(384, 500, 384, 500)), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 500, 1, 16, generator=g, dtype=torch.float64) for _ in range(3))
    kernel = KERNELS["flex"]()
    out, _ = kernel.forward(q, k, v, slice_table(slices), scores=ScoreRules(scale=SCALE))
    i, j = torch.arange(500)[:, None], torch.arange(500)
    document = torch.tensor([0] * 300 + [1] * 84 + [2] * 116)
    seen = (document[:, None] == document) & ((i >= 384) | ((i >= j) & (i - j <= 150)))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen, scale=SCALE
    )
    torch.testing.assert_close(out, wanted.transpose(1, 2))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_itself_agrees():
    """PyTorch's own FlexAttention, whose forward also runs on the CPU (its backward does not)."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 30, h, 16, generator=g) for h in (4, 2, 2))
    bias = RelativeBias(torch.randn(8, H, generator=g), max_distance=12)
    scores = ScoreRules(
        scale=SCALE, softcap=2.0, relative_bias=bias, alibi_slopes_H=torch.tensor([0.5, 0.25, 0.1, 0.0])
    )
    ours = [
        FlexKernel(f).forward(q, k, v, slice_table(SLICES["packed window"]), scores=scores)
        for f in (flex_attention, flash_stand_in.flex)
    ]
    torch.testing.assert_close(*ours, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_flex_compiles_no_more_once_lengths_have_changed(monkeypatch):
    """The ninth compilation of one function would end the run, and a variable scale is none that its kernels take."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(next(node for node in graph.graph.nodes if "flex_attention" in str(node.target)))
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    flex._compiled.cache_clear()
    kernel, g = FlexKernel(), torch.Generator().manual_seed(0)
    kinds = (ScoreRules(scale=0.3, softcap=2.0), ScoreRules(scale=0.25, alibi_slopes_H=torch.rand(2)))
    for number, (rows, keys) in enumerate(((300, 300), (257, 400), (1, 1), (1, 300), (130, 5), (520, 129))):
        for scores in kinds:
            q, k = (torch.randn(1, n, 2, 16, generator=g) for n in (rows, keys))
            slices = slice_table([AttentionSlice(0, rows, 0, keys)])
            got = kernel.forward(q, k, k, slices, scores=scores)
            want = KERNELS["flex"]().forward(q, k, k, slices, scores=scores)
            # scores of about 10 in float32, beside float64
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        if number == 2:
            known = len(graphs)
    flex._compiled.cache_clear()
    assert len(graphs) == known <= 3 * len(kinds)
    assert {node.args[5] for node in graphs} == {0.3, 0.25}, "the scale is a constant"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_fails_before_it_forms_whole_scores(monkeypatch):
    """Past its limit of compilations PyTorch calls FlexAttention uncompiled, which forms all scores at once."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=lambda graph, example_inputs: graph))
    flex._compiled.cache_clear()
    kernel, g = FlexKernel(), torch.Generator().manual_seed(0)

    def attend(rows: int) -> None:
        q = torch.randn(1, rows, 2, 16, generator=g)
        kernel.forward(q, q, q, slice_table([AttentionSlice(0, rows, 0, rows)]), scores=ScoreRules(scale=SCALE))

    with torch._dynamo.config.patch(recompile_limit=1):
        attend(300)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            attend(257)
    flex._compiled.cache_clear()


def test_flex_keeps_masks_up_to_a_limit_and_no_longer_than_their_calls():
    tables = [slice_table([AttentionSlice(0, n, 0, n, 0)]) for n in (1301, 1302, 1303)]
    calls = [calls_on(table, 1, torch.device("cpu"), relative_positions=False)[0] for table in tables]
    one = flex.prepare_call(calls[0]).num_bytes()
    # 11 × 11 blocks in four lists of int32, and a few vectors of a number a row
    assert 4 * 4 * 11 * 11 < one < 4 * 4 * 11 * 11 + 40 * 1301
    kept = flex.PreparedCalls(int(2.5 * one))
    first = kept.of(calls[0])
    assert kept.of(calls[0]) is first
    kept.of(calls[1])
    assert kept.of(calls[0]) is first
    kept.of(calls[2])  # the one met longest ago makes room
    assert kept.of(calls[0]) is first
    assert len(kept) == 2
    assert kept.num_bytes <= 2.5 * one
    small = flex.PreparedCalls(1)
    small.of(calls[0])
    small.of(calls[1])
    assert len(small) == 1
    copy = replace(calls[0])
    kept.of(copy)
    del copy
    gc.collect()
    assert kept.num_bytes == sum(kept.of(call).num_bytes() for call in (calls[0],))


def test_flex_backward_runs_behind_an_operator(monkeypatch):
    """Its backward uses autograd itself, inside an operator that autograd does not look into."""
    monkeypatch.setitem(kernel_selection.KERNELS, "flex", KERNELS["flex"]())
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 10, 2, 16, generator=g).requires_grad_() for _ in range(3)]
    table, slices = torch.randn(8, 2, generator=g).requires_grad_(), (AttentionSlice(0, 10, 0, 10, 0),)
    scores = ScoreRules(scale=SCALE, relative_bias=RelativeBias(table, max_distance=12))
    with torch.no_grad():  # as in an autograd.Function
        out, lse = ops.forward("flex", *inputs, slice_table(slices), scores=scores)
        ours, exact = (
            ops.backward(n, out, *inputs, out, lse, slice_table(slices), scores=scores) for n in ("flex", "reference")
        )
    torch.testing.assert_close(tuple(ours), tuple(exact), atol=1e-5, rtol=1e-5, check_dtype=False)


# --- what they refuse ---------------------------------------------------------------------------------------------

GOOD = KernelRequest("cuda", torch.bfloat16, 128, 32, 8)


@pytest.mark.parametrize("name", KERNELS)
def test_supports(name):
    kernel = KERNELS[name]()
    assert kernel.supports(GOOD) is None
    assert "not on cpu" in kernel.supports(replace(GOOD, device_type="cpu"))
    assert "float64" in kernel.supports(replace(GOOD, dtype=torch.float64))
    assert "256" in kernel.supports(replace(GOOD, head_dim=264))
    assert "do not divide" in kernel.supports(replace(GOOD, num_kv_heads=5))
    assert kernel.supports(replace(GOOD, window=True)) is None
    assert (kernel.supports(replace(GOOD, rules=("softcap",))) is None) == (name != "cuda_flash")
    assert (kernel.supports(replace(GOOD, rules=("alibi",))) is None) == (name == "flex")
    assert (kernel.supports(replace(GOOD, rules=("relative_bias",))) is None) == (name == "flex")
    kernel.capability = (7, 5)
    assert "ompute capability" in kernel.supports(GOOD)


@pytest.mark.parametrize("name", ["flash2", "flash4", "cuda_flash"])
def test_deterministic_requests(name):
    wish = replace(GOOD, deterministic=True)
    assert "deterministic" in KERNELS[name]().supports(wish)
    if name != "cuda_flash":
        kernel = FlashKernel(LIBRARIES[name], object(), capability=HOPPER, deterministic=True)
        assert kernel.supports(wish) is None
        assert kernel.supports(replace(wish, head_dim=256)) is None
    assert "in a varying order" in KERNELS["flex"]().supports(replace(wish, rules=("relative_bias",)))


def test_generations():
    for major in (8, 9, 10, 12):
        flash2, flash4 = (FlashKernel(x, object(), capability=(major, 0)) for x in (FLASH2, FLASH4))
        assert flash2.supports(GOOD) is None
        assert (flash4.supports(GOOD) is None) == (major != 8)
    assert flash4.supports(replace(GOOD, rules=("softcap",))) == "no soft cap on compute capability 12.x"
    assert "deterministic" in FlashKernel(FLASH4, object(), capability=(12, 0), deterministic=True).supports(
        replace(GOOD, deterministic=True)
    )
    assert "head size 192" in flash4.supports(replace(GOOD, head_dim=192, value_dim=128))
    old = FlashKernel(FLASH4, object(), capability=(8, 6)).supports(GOOD)
    assert old == "needs compute capability 9 to 12; the device has 8.6"


def test_head_sizes():
    assert FLASH2.head_sizes(192, 128, 9) == (192, 192)
    assert FLASH2.head_sizes(100, 50, 9) == (104, 104)
    assert [FLASH4.head_sizes(192, 128, major) for major in (9, 10, 12)] == [(192, 128), (192, 128), None]
    assert FLASH4.head_sizes(160, 160, 10) == (256, 256)
    assert FLASH4.head_sizes(60, 128, 10) == (64, 128)
    assert FLASH4.head_sizes(60, 128, 12) == (128, 128)
    assert FLASH4.head_sizes(260, 64, 9) is None
    assert [FLASH3.head_sizes(*sizes, 9) for sizes in ((192, 128), (190, 100), (128, 64), (64, 128), (80, 80))] == [
        (192, 128),
        (192, 104),
        (128, 128),
        (128, 128),
        (80, 80),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where nothing is")
def test_without_libraries_and_device():
    for library in (FLASH2, FLASH3, FLASH4):
        assert "not installed" in FlashKernel(library, capability=HOPPER).supports(GOOD)
        assert "no CUDA device" in FlashKernel(library).supports(GOOD)
    assert FlashKernel(CUDA_FLASH).supports(GOOD) is not None
    assert "no CUDA device" in FlashKernel(CUDA_FLASH, object()).supports(GOOD)
    assert "no CUDA device" in FlexKernel().supports(GOOD)
    q = torch.randn(1, 4, 1, 8)
    for library in (FLASH2, FLASH3, FLASH4):
        kernel = FlashKernel(library, capability=HOPPER)
        with pytest.raises(ConfigError, match="not installed"):
            kernel.forward(q, q, q, slice_table([AttentionSlice(0, 4, 0, 4)]), scores=ScoreRules(scale=1.0))


@pytest.fixture
def on_device(monkeypatch):
    """Makes every CUDA kernel of ``auto`` go by a compute capability, with the libraries that are named there."""

    def place(major, *installed):
        for name, kernel in kernel_selection.KERNELS.items():
            if isinstance(kernel, FlashKernel):
                ops = object() if kernel.library.name in installed else None
                copy = FlashKernel(kernel.library, ops, capability=(major, 0), deterministic=kernel.deterministic)
                monkeypatch.setitem(kernel_selection.KERNELS, name, copy)
            elif name == "flex":
                monkeypatch.setitem(kernel_selection.KERNELS, name, FlexKernel(object(), capability=(major, 0)))
        kernel_selection.resolve_kernel.cache_clear()

    yield place
    kernel_selection.resolve_kernel.cache_clear()


WISHES = {"": {}, "deterministic": {"deterministic": True}, "alibi": {"rules": ("alibi",)}}


@pytest.mark.parametrize(
    ("major", "wish", "wanted"),
    [
        (8, "", "flash2"),
        (9, "", "flash3"),  # flash-attn 4 is a beta: the releases go first
        (10, "", "flash4"),
        (12, "", "flash2"),
        (8, "deterministic", "flash2_deterministic"),
        (9, "deterministic", "flash2_deterministic"),  # flash-attn 3's reads semaphores that nobody sets
        (10, "deterministic", "flash4_deterministic"),
        (9, "alibi", "flex"),
    ],
)
def test_auto_prefers_the_fastest(on_device, major, wish, wanted):
    """Each generation's kernel, were all libraries there; and what is left when a wish excludes them."""
    on_device(major, *LIBRARIES)
    choice = kernel_selection.resolve_kernel("auto", replace(GOOD, **WISHES[wish]))
    assert choice.name == wanted
    assert choice.install_hint is None


@pytest.mark.parametrize(
    ("major", "installed", "wish", "wanted", "advised"),
    [
        (9, ("cuda_flash",), "", "cuda_flash", "prefer flash3 (python setup.py install"),
        (10, ("cuda_flash",), "", "cuda_flash", "flash-attn-4=="),
        (8, ("flash2",), "", "flash2", None),  # flash-attn 4 does not run there
        (9, ("cuda_flash",), "alibi", "flex", None),  # no library that is missing has ALiBi
        (9, (), "deterministic", "flex", "auto would prefer flash2_deterministic (pip install flash-attn==2.8.3"),
    ],
)
def test_the_reason_and_what_to_install(on_device, caplog, major, installed, wish, wanted, advised):
    on_device(major, *installed)
    request = replace(GOOD, **WISHES[wish])
    with caplog.at_level("INFO", logger="longctx"):
        choices = [kernel_selection.resolve_kernel("auto", request) for _ in range(2)]
    choice = choices[0]
    assert choice.name == wanted == kernel_selection.choose_kernel("auto", request).name
    assert (choice.install_hint is None) == (advised is None)
    assert (advised or "") in (choice.install_hint or "")
    # one line of the log says it all, once
    assert [record.getMessage() for record in caplog.records] == [f"Attention kernel for {request}: {choice}"]
    assert (advised or "") in caplog.text
    assert kernel_selection.resolve_kernel(wanted, request).reason == f"parallel.kernel={wanted!r}"

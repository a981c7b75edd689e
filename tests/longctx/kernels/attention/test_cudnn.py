"""cuDNN's attention: slices as squares and rectangles, one key, what it refuses; on a stand-in of its operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longctx.errors import ConfigError
from longctx.kernels.attention.flash.cudnn import CudnnKernel, squares_and_rectangles
from longctx.kernels.attention.kernel_interface import KernelRequest, ScoreRules
from longctx.kernels.attention.slices import AttentionSlice, slice_table
from tests.longctx.kernels.attention import flash_stand_in
from tests.longctx.kernels.attention.kernel_cases import band_matrix
from tests.longctx.kernels.attention.test_flash_adapters import SCALE, SLICES, check

HOPPER = (9, 0)
GOOD = KernelRequest("cuda", torch.bfloat16, 128, 32, 8)
WITHOUT_WINDOW = {name: slices for name, slices in SLICES.items() if all(s.hi is None for s in slices)}


def kernel(**options) -> CudnnKernel:
    return CudnnKernel(flash_stand_in.Cudnn(), **{"capability": HOPPER, "version": 91100} | options)


@pytest.mark.parametrize("case", WITHOUT_WINDOW)
def test_masks(case):
    check(kernel(), WITHOUT_WINDOW[case])


def test_heads_and_sizes():
    for K, D, V, B in ((1, 8, 8, 1), (4, 5, 5, 1), (2, 24, 16, 3), (2, 8, 13, 1), (2, 192, 128, 1)):
        check(kernel(), SLICES["packed"], K=K, D=D, V=V, B=B)


@given(
    ranges=st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9), st.integers(1, 9)),
    lo=st.none() | st.integers(-12, 12),
)
def test_pieces_cover_exactly_the_slice(ranges, lo):
    q0, rows, k0, keys = ranges
    one = AttentionSlice(q0, q0 + rows, k0, k0 + keys, lo)
    covered = torch.zeros(20, 20, dtype=torch.int64)
    pieces = squares_and_rectangles(slice_table([one])).tolist()
    assert len(pieces) <= 3
    for a, b, c, d, causal in pieces:
        assert not causal or b - a == d - c, "a triangle is square: then both corners are the same"
        mask = torch.ones(b - a, d - c, dtype=torch.int64)
        covered[a:b, c:d] += mask.tril() if causal else mask
    assert torch.equal(covered, band_matrix([one], 20, 20))


def test_a_causal_row_is_one_call_and_a_hop_two():
    for slices, wanted in (
        ([AttentionSlice(0, 30, 0, 30, 0)], [(30, 30, True)]),
        ([AttentionSlice(0, 20, 0, 30, -10, None, 1, 10)], [(20, 20, True), (20, 10, False)]),
    ):
        cudnn = kernel()
        q, k = torch.randn(1, 30, 2, 8).bfloat16(), torch.randn(1, 30, 1, 8).bfloat16()
        cudnn.forward(q, k, k, slice_table(slices), scores=ScoreRules(scale=SCALE))
        assert cudnn.ops.calls == wanted


def test_supports():
    assert kernel().supports(GOOD) is None
    refusals = {
        "not on cpu": replace(GOOD, device_type="cpu"),
        "not in float32": replace(GOOD, dtype=torch.float32),
        "no soft cap": replace(GOOD, rules=("softcap",)),
        "no window": replace(GOOD, window=True),
        "not bitwise reproducible": replace(GOOD, deterministic=True),
        "the limit is 192": replace(GOOD, head_dim=200),
        "no head size 192 with value size 192": replace(GOOD, head_dim=192),
        "do not divide": replace(GOOD, num_kv_heads=5),
    }
    for said, request in refusals.items():
        assert said in (kernel().supports(request) or "")
    latent = replace(GOOD, head_dim=192, value_dim=128)
    assert kernel().supports(latent) is None
    assert "no head size 192" in (kernel(version=91000).supports(latent) or "")
    assert "no head size 192" in (kernel(capability=(8, 0)).supports(latent) or "")
    assert "the device has 7.5" in (kernel(capability=(7, 5)).supports(GOOD) or "")
    if not torch._C._has_cudnn:
        assert CudnnKernel(capability=HOPPER).supports(GOOD) == "this PyTorch was built without cuDNN"


def test_a_window_is_refused_by_the_call_too():
    q, slices = torch.randn(1, 9, 1, 8), slice_table([AttentionSlice(0, 9, 0, 9, 0, 3)])
    with pytest.raises(ConfigError, match="does not support a window"):
        kernel().forward(q, q, q, slices, scores=ScoreRules(scale=1.0))


@pytest.mark.skipif(torch._C._has_cudnn, reason="says what is missing where it is")
def test_a_build_without_cudnn_says_so():
    q = torch.randn(1, 9, 1, 8)
    with pytest.raises(ConfigError, match="built without cuDNN"):
        CudnnKernel(capability=HOPPER).forward(
            q, q, q, slice_table([AttentionSlice(0, 9, 0, 9)]), scores=ScoreRules(scale=1)
        )

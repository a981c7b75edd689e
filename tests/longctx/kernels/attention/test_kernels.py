"""Attention kernels of one device, their choice, and the local core."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.errors import ConfigError
from longctx.kernels.attention import attention_tiles
from longctx.kernels.attention.attention_tiles import row_blocks
from longctx.kernels.attention.kernel_interface import KernelRequest, merge_
from longctx.kernels.attention.kernel_selection import KERNELS, choose_kernel
from longctx.kernels.attention.slices import AttentionSlice
from longctx.kernels.processor import MATMUL_MODES
from longctx.model.attention.local import document_slices
from longctx.model.attention.mask import AttentionMask
from tests.longctx.kernels.attention.kernel_cases import any_slices, band_matrix, plain_attention, tensors


@given(one=any_slices(14), rows=st.integers(2, 6), keys=st.integers(3, 7), wide=st.integers(6, 9))
@settings(max_examples=300, deadline=None)
def test_tiles_cover_exactly_the_band(one, rows, keys, wide):
    covered = torch.zeros(14, 14, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_tiles, "_NARROW", 2)
        patch.setattr(attention_tiles, "_MAX_MASKED_TILE", wide)
        for block in row_blocks(one, rows=min(rows, keys), keys=keys):
            num_rows = block.q.stop - block.q.start
            assert 0 < num_rows <= rows
            for tile in block.tiles:
                num_keys = tile.k.stop - tile.k.start
                assert 0 < num_keys < 2 * keys + num_rows
                part = band_matrix([AttentionSlice(0, num_rows, 0, num_keys, tile.lo, tile.hi)], num_rows, num_keys)
                assert part.any(1).all(), "a row that sees no key would come back with lse 0"
                assert (tile.lo, tile.hi) == (None, None) or not part.all(), "a bound that cuts nothing"
                covered[block.q, tile.k] += part
    assert torch.equal(covered, band_matrix([one], 14, 14))


@given(
    num_keys=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 9), max_size=4),
    blind=st.lists(st.booleans(), min_size=5, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_merging_parts_gives_the_whole(num_keys, cuts, blind):
    q, k, v = tensors(5, num_keys, torch.float64)
    seen = torch.ones(5, num_keys, dtype=torch.int64)
    seen[torch.tensor(blind)] = 0
    whole = plain_attention(q, k, v, seen)
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    edges = sorted({0, num_keys, *(min(c, num_keys) for c in cuts)})
    for a, b in pairwise(edges):
        merge_(out, lse, *plain_attention(q, k[:, a:b], v[:, a:b], seen[:, a:b]))
    torch.testing.assert_close((out, lse), whole)


def request(device: str = "cpu", dtype: torch.dtype = torch.float32) -> KernelRequest:
    return KernelRequest(device, dtype, 8, 4, 2)


def test_kernel_choice():
    assert choose_kernel("auto", request()).name == "cpu_flash"
    assert choose_kernel("auto", replace(request(), window=True, value_dim=5, deterministic=True)).name == "cpu_flash"
    for rule in ("softcap", "alibi", "relative_bias"):
        assert choose_kernel("auto", replace(request(), rules=(rule,))).name == "blockwise"
    assert choose_kernel("reference", request()).name == "reference"
    for products in MATMUL_MODES:
        for name in ("auto", "cpu_flash"):
            asked = choose_kernel(name, replace(request(dtype=torch.bfloat16), matmul_mode=products))
            assert asked.name == f"cpu_flash_{products}"
            assert choose_kernel(name, replace(request(), matmul_mode=products)).name == "cpu_flash"
        assert (
            choose_kernel("blockwise", replace(request(dtype=torch.bfloat16), matmul_mode=products)).name == "blockwise"
        )
    with pytest.raises(ConfigError, match="unknown"):
        choose_kernel("flsh", request())
    with pytest.raises(ConfigError, match="runs on the CPU"):
        choose_kernel("cpu_flash", request(device="cuda"))
    with pytest.raises(ConfigError, match="no attention kernel"):
        choose_kernel("auto", request(dtype=torch.int64))
    assert "mps lacks" in (KERNELS["blockwise"].supports(request(device="mps")) or "")


def test_document_slices_skip_empty_segments():
    assert document_slices(AttentionMask((0, 3, 3, 8))) == (
        AttentionSlice(0, 3, 0, 3, lo=0),
        AttentionSlice(3, 8, 3, 8, lo=0),
    )

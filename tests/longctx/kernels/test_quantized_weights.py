"""Weights in 4 and 8 bits: against plain formulas, in any range, and the exact number of bits."""

from __future__ import annotations

import math

import pytest
import torch

from longctx.kernels.quantized_weights import (
    NF4_VALUES,
    PackedLayout,
    dequantize,
    fill_packed,
    fill_rounded,
    quantize,
)

SHAPES = [(64, 64), (130, 300), (5, 7), (1, 1), (3, 129, 70), (2, 9, 11), (256, 128)]
LEVELS = torch.tensor(NF4_VALUES)


def nf4(weight: torch.Tensor) -> torch.Tensor:
    """Block after block: the nearest level, by comparing with all of them."""
    out = torch.empty_like(weight).view(-1)
    for start in range(0, weight.numel(), 64):
        block = weight.reshape(-1)[start : start + 64]
        absmax = block.abs().max()
        nearest = (block * (1 / absmax.clamp(min=1e-38)) - LEVELS[:, None]).abs().argmin(0)
        out[start : start + 64] = LEVELS[nearest] * absmax
    return out.view_as(weight)


def fp8(weight: torch.Tensor) -> torch.Tensor:
    """As DeepSeek's ``weight_quant`` and ``weight_dequant``, block after block."""
    out = torch.empty_like(weight)
    for i in range(0, weight.shape[0], 128):
        for j in range(0, weight.shape[1], 128):
            block = weight[i : i + 128, j : j + 128]
            scale = block.abs().max() / 448
            out[i : i + 128, j : j + 128] = (block / scale).to(torch.float8_e4m3fn).float() * scale
    return out


PLAIN = {"nf4": nf4, "fp8": fp8}


def random(shape: tuple[int, ...]) -> torch.Tensor:
    return 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", PLAIN)
def test_values_are_those_of_the_plain_formula(kind, shape, dtype):
    weight, layout = random(shape), PackedLayout(kind, shape)
    packed = quantize(weight, layout)
    assert packed.shape == layout.packed_shape
    assert packed.numel() == layout.num_bytes
    wanted = torch.stack([PLAIN[kind](matrix) for matrix in weight.view(-1, *shape[-2:])]).view(shape)
    assert torch.equal(dequantize(packed, layout, dtype), wanted.to(dtype))


def test_codes_and_scales_are_those_of_bitsandbytes():
    bitsandbytes = pytest.importorskip("bitsandbytes.functional")
    for shape in ((300, 129), (512, 64), (7, 9)):
        weight, layout = random(shape), PackedLayout("nf4", shape)
        codes, state = bitsandbytes.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        packed, blocks = quantize(weight, layout), weight.numel() // 64
        units = packed[: 36 * blocks].view(blocks, 36)
        assert torch.equal(units[:, 4:].flatten(), codes.flatten()[: 32 * blocks])
        assert torch.equal(units[:, :4].clone().view(torch.float32).flatten(), state.absmax[:blocks])
        values = bitsandbytes.dequantize_4bit(codes, state, quant_type="nf4")
        assert torch.equal(dequantize(packed, layout, torch.float32), values)


def test_a_number_beside_a_midpoint_gets_the_nearer_code():
    midpoints = (LEVELS[1:] + LEVELS[:-1]) / 2
    cells = torch.arange(2049) / 1024 - 1
    hard = torch.cat((midpoints, cells))
    one = torch.tensor(2.0)
    numbers = torch.cat((hard, torch.nextafter(hard, one), torch.nextafter(hard, -one))).clamp(-1, 1)
    # One number and the absolute maximum, 1, in each block of 64.
    weight = torch.zeros(len(numbers), 64)
    weight[:, 0], weight[:, 1] = numbers, 1.0
    layout = PackedLayout("nf4", tuple(weight.shape))
    found = dequantize(quantize(weight, layout), layout, torch.float32)[:, 0]
    assert torch.equal(found, LEVELS[torch.bucketize(numbers, midpoints)])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", PLAIN)
def test_any_range_is_quantized_by_itself(kind, shape):
    weight, layout = random(shape), PackedLayout(kind, shape)
    packed, flat = quantize(weight, layout), weight.flatten()
    rounded = dequantize(packed, layout, torch.float32).flatten()

    def read(start: int, out: torch.Tensor) -> None:
        out.copy_(flat[start : start + len(out)])

    for size in (1, 13, 1000):
        for start in range(0, layout.num_bytes, max(1, layout.num_bytes // 9)):
            out = torch.empty(min(size, layout.num_bytes - start), dtype=torch.uint8)
            fill_packed(out, layout, read, start=start)
            assert torch.equal(out, packed.flatten()[start : start + len(out)])
        for start in range(0, len(flat), max(1, len(flat) // 9)):
            out = torch.empty(min(size, len(flat) - start))
            fill_rounded(out, layout, read, start=start)
            assert torch.equal(out, rounded[start : start + len(out)])


@pytest.mark.parametrize(
    ("kind", "shape", "bits"),
    [
        ("nf4", (4096, 4096), 4.5),
        ("nf4", (64, 1), 4.5),
        ("fp8", (4096, 4096), 8 + 32 / 128**2),
        ("fp8", (64, 64), 8 + 1 / 128),
    ],
)
def test_bits_per_weight_are_exact(kind, shape, bits):
    layout = PackedLayout(kind, shape)
    assert 8 * layout.num_bytes / math.prod(shape) == bits


@pytest.mark.parametrize("kind", PLAIN)
def test_zeros_stay_zeros_and_nan_stays_visible(kind):
    layout = PackedLayout(kind, (128, 128))
    weight = torch.zeros(128, 128)
    assert not dequantize(quantize(weight, layout), layout, torch.float32).any()
    weight[3, 5] = torch.nan
    assert dequantize(quantize(weight, layout), layout, torch.float32)[3, 5].isnan()


@pytest.mark.parametrize("kind", PLAIN)
def test_bytes_may_be_at_any_address(kind):
    layout = PackedLayout(kind, (130, 70))
    packed = quantize(random((130, 70)), layout)
    moved = torch.empty(layout.num_bytes + 3, dtype=torch.uint8)[3:]
    moved.copy_(packed)
    assert torch.equal(dequantize(moved, layout, torch.float32), dequantize(packed, layout, torch.float32))

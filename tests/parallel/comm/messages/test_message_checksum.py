"""Sums over all bits: which damage they find, on a CPU and as other devices form them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from longctx.tensor_bytes import as_bytes
from parallel.comm.messages.message_checksum import bit_sum, grid_sum, is_sum_of, mixed, on_host

SUMS: dict[str, Callable[[Tensor], int]] = {
    "as on a CPU": lambda x: int(bit_sum([x])),
    "as on other devices": lambda x: int(grid_sum(x)),
}
both = pytest.mark.parametrize("sum_of", SUMS.values(), ids=SUMS)


def drawn(num_bytes: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=g)


def flipped(x: Tensor, *bits: int) -> Tensor:
    other = x.clone()
    for bit in bits:
        as_bytes(other)[bit // 8] ^= 1 << bit % 8
    return other


@both
@pytest.mark.parametrize("num_bytes", [1, 7, 8, 29, 200])
def test_each_flipped_bit_of_a_small_message_is_found(sum_of, num_bytes):
    x = drawn(num_bytes)
    sums = {sum_of(flipped(x, bit)) for bit in range(8 * num_bytes)}
    assert len(sums | {sum_of(x)}) == 8 * num_bytes + 1, "all different"


@both
@pytest.mark.parametrize("fill", ["zeros", "ones", "drawn"])
def test_flipped_bits_of_a_large_message_are_found(sum_of, fill):
    """One, two, three and many, whatever the bytes: also the top bits of words, whose sums lose what is carried."""
    x = {"zeros": torch.zeros(40_003, dtype=torch.uint8), "ones": torch.full((40_003,), 255, dtype=torch.uint8)}.get(
        fill, drawn(40_003)
    )
    before, draw = sum_of(x), random.Random(0)
    tops = [64 * word + 63 for word in range(40_003 // 8)]
    for count in (1, 2, 3, 17):
        for places in (range(8 * 40_003), tops, range(64 * 2000, 64 * 2064)):
            assert sum_of(flipped(x, *draw.sample(places, count))) != before
    # The same bit of two words of a row, and of a column: there and back.
    assert sum_of(flipped(x, 5, 5 + 64)) != before
    assert sum_of(flipped(x, 5, 5 + 64 * 1024)) != before


@both
def test_bytes_that_changed_places_are_found(sum_of):
    x = drawn(24_000).view(-1, 48)
    before = sum_of(x)
    for one, other in ((0, 1), (3, 400), (17, 188)):
        order = list(range(len(x)))
        order[one], order[other] = other, one
        assert sum_of(x[order]) != before
    assert sum_of(x.roll(1, 0)) != before


def test_four_flips_at_the_corners_of_a_rectangle_are_what_the_grid_misses():
    """Said on the page: the sums of all rows and columns stay."""
    x = torch.zeros(3 * 8192, dtype=torch.uint8)
    x[0], x[8192 + 80] = 1, 1
    corners = (0, 8 * 80, 8 * 8192, 8 * (8192 + 80))
    assert grid_sum(flipped(x, *corners)) == grid_sum(x)
    assert bit_sum([flipped(x, *corners)]) != bit_sum([x])


@both
def test_every_dtype_place_and_nan_is_summed_by_its_bits(sum_of):
    """Views that begin anywhere; both zeros, and every NaN, are values of their own."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int16):
        x = torch.arange(64).to(dtype)
        for start in range(6):
            assert sum_of(x[start:]) == sum_of(x[start:].clone())
            assert sum_of(x[start:]) != sum_of(x[: 64 - start]) or not start
    assert sum_of(torch.tensor([0.0])) != sum_of(torch.tensor([-0.0]))
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).split(1)
    assert sum_of(quiet) == sum_of(quiet.clone()) != sum_of(other)
    assert sum_of(torch.zeros(2, 0, 3)) == sum_of(torch.zeros(0))


def test_several_tensors_are_one_message():
    a, b = drawn(64), drawn(64, seed=1)
    assert bit_sum([a, b]) == bit_sum([a.clone(), b.clone()])
    assert len({bit_sum(x) for x in ([a, b], [b, a], [a], [a, a])}) == 4


def test_mixing_loses_nothing():
    values = torch.cat([torch.arange(-5000, 5000), torch.arange(64).new_ones(64) << torch.arange(64)])
    assert len(mixed(values).unique()) == len(values.unique())


@pytest.mark.gpu
def test_a_gpu_forms_the_same_sum_and_waits_for_nobody():
    for num_bytes in (1, 29, 40_003, 1 << 22):
        x = drawn(num_bytes)
        there = x.cuda()
        with torch.cuda.device(0):
            torch.cuda.set_sync_debug_mode("error")
            try:
                total = bit_sum([there])
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert int(total) == int(grid_sum(x))


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("numel", [0, 1, 1023, 4099])
def test_what_has_moved_is_held_against_its_sum(start: int, numel: int):
    """Of either way to sum, also where it no longer lies at a whole word; a bit that flipped is another sum."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    moved = torch.empty(start + numel)[start:].copy_(x)
    sums = on_host([bit_sum([x]), grid_sum(x), bit_sum([x])])
    assert [int(total) for total in sums] == [bit_sum([x]), int(grid_sum(x)), bit_sum([x])], "in their order"
    assert all(is_sum_of(total, moved) for total in sums)
    if numel:
        moved.view(torch.int32)[-1] ^= 1 << 7
        assert not any(is_sum_of(total, moved) for total in sums)

"""Slots of short sequences: who has which, what their rows hold, and what copies and long sequences do."""

from __future__ import annotations

import torch

from longctx.model.attention.kv_cache import KVCache
from longctx.model.attention.slots import SLOT_TOKENS, SlotPool


def rows(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of so many tokens."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(1, num_tokens, 2, 4, generator=g), torch.randn(1, num_tokens, 2, 3, generator=g)


def slot_of(cache: KVCache) -> int | None:
    placement = cache.chunk(1).placement
    return None if placement is None else placement.number


def test_the_first_free_slot_is_taken_and_none_is_taken_twice():
    pool = SlotPool(2)
    first, second, third = (KVCache(pool) for _ in range(3))
    assert [slot_of(cache) for cache in (first, second, third)] == [0, 1, None]
    first.free()
    assert slot_of(KVCache(pool)) == 0
    third.free()
    assert pool.take() is None


def test_rows_of_one_slot_are_not_those_of_another():
    pool = SlotPool(3)
    caches = [KVCache(pool) for _ in range(3)]
    given = [rows(length, seed) for seed, length in enumerate((5, 70, 1))]
    for cache, (keys, values) in zip(caches, given, strict=True):
        cache.layer(0).append(keys, values)
    for number, (cache, (keys, values)) in enumerate(zip(caches, given, strict=True)):
        more = rows(2, 10 + number)
        found = cache.layer(0).append(*more)
        for of_cache, before, new in zip(found, (keys, values), more, strict=True):
            assert of_cache is not None
            assert torch.equal(of_cache, torch.cat((before, new), dim=1))
    # Rows that no sequence has yet are hidden by a mask, and must be numbers all the same.
    for tensor in pool.layer(0).first_rows(slice(0, 3), 72):
        assert tensor is not None
        assert tensor.isfinite().all()


def test_a_sequence_that_no_longer_fits_keeps_its_rows():
    pool = SlotPool(1)
    layer = KVCache(pool).layer(0)
    keys, values = rows(SLOT_TOKENS + 30)
    for start in range(0, SLOT_TOKENS + 30, 30):
        part = slice(start, start + 30)
        found_keys, found_values = layer.append(keys[:, part], values[:, part])
        assert (layer.slots is not None) == (found_keys.shape[1] <= SLOT_TOKENS)
        assert torch.equal(found_keys, keys[:, : start + 30])
        assert found_values is not None
        assert torch.equal(found_values, values[:, : start + 30])


def test_copies_go_on_in_different_ways():
    for pool in (None, SlotPool(1), SlotPool(2)):
        cache = KVCache(pool)
        keys, values = rows(9)
        cache.layer(0).append(keys, values)
        other = cache.copy()
        assert other.num_tokens == 9
        ways = [each.layer(0).append(*rows(3, seed)) for seed, each in ((1, cache), (2, other))]
        for seed, (found, _) in enumerate(ways, start=1):
            assert torch.equal(found, torch.cat((keys, rows(3, seed)[0]), dim=1))

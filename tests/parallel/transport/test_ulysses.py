"""Heads that are split unevenly: gradients of expanded key heads return to the heads they came from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel.mesh import Mesh
from parallel.transport.ulysses import HeadExchange

TOKENS, HEAD_DIM = 33, 16


def exchange_of(heads: int, kv_heads: int, ulysses: int, rank: int) -> HeadExchange:
    mesh = Mesh(rank=rank, world_size=ulysses, context=ulysses, ulysses=ulysses)
    return HeadExchange.build(mesh, heads, kv_heads)


def by_index(exchange: HeadExchange, key_of_query: list[int], grad: Tensor) -> Tensor:
    """The same sums by ``index_add_``, which on a CPU adds head after head."""
    folded = grad.new_zeros(1, TOKENS, exchange.key_heads.stop - exchange.key_heads.start, HEAD_DIM)
    return folded.index_add_(2, torch.tensor(key_of_query), grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "ulysses"), [(12, 4, 5), (40, 8, 3), (24, 8, 5)])
def test_gradients_of_expanded_heads_are_added_head_after_head(heads, kv_heads, ulysses, dtype):
    num_uneven = 0
    for rank in range(ulysses):
        exchange = exchange_of(heads, kv_heads, ulysses, rank)
        torch.manual_seed(rank)
        grad = torch.randn(1, TOKENS, exchange.num_kernel_key_heads, HEAD_DIM).to(dtype)
        folded = exchange.fold(grad)
        key_of_query = exchange.split.key_of_query(rank)
        if key_of_query is None:
            assert folded is grad
            continue
        num_uneven += 1
        assert torch.equal(folded, by_index(exchange, key_of_query, grad))
        # Each of n − 1 additions rounds by eps/2 of a partial sum, which the sum of magnitudes bounds; twice that.
        exact = by_index(exchange, key_of_query, grad.double())
        bound = by_index(exchange, key_of_query, grad.double().abs()) * torch.finfo(dtype).eps * heads / kv_heads
        assert ((folded.double() - exact).abs() <= bound).all()
    assert num_uneven


def test_it_is_the_transpose_of_expanding():
    exchange = exchange_of(40, 8, 3, 1)
    torch.manual_seed(0)
    x = torch.randn(1, TOKENS, 8, HEAD_DIM, dtype=torch.float64)[:, :, exchange.key_heads]
    grad = torch.randn(1, TOKENS, exchange.num_kernel_key_heads, HEAD_DIM, dtype=torch.float64)
    torch.testing.assert_close((exchange.expand(x) * grad).sum(), (x * exchange.fold(grad)).sum(), rtol=1e-12, atol=0)

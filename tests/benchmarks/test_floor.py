"""The floor has the step's products and no other."""

from __future__ import annotations

import torch

from benchmarks.floor import expert_rows, products
from longctx.config import ModelConfig
from longctx.model.decoder import Decoder

SMALL = {
    "hidden_size": 32,
    "vocab_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_size": 48,
}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 24}


def decoder(**changes) -> Decoder:
    return Decoder(ModelConfig(**SMALL, **changes))


def tokens(count: int) -> torch.Tensor:
    return torch.randint(64, (1, count), generator=torch.Generator().manual_seed(0))


def test_dense_products_are_the_weights_times_the_tokens():
    model = decoder()
    found = sum(product.flops for product in products(model, 40, []))
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    head = 64 * 32 if model.lm_head.weight is None else 0  # a tied head multiplies with the embedding
    assert found == 6 * 40 * (sum(p.numel() for p in matrices) + head)


def test_experts_multiply_the_rows_that_the_router_sends_them():
    model = decoder(**EXPERTS)
    rows = expert_rows(model, tokens(40))
    assert [sum(layer) for layer in rows] == [80, 80]
    gate_up = (2 * 24, 32)
    sent = [product.rows for product in products(model, 40, rows) if product.weight_OI.shape == gate_up]
    assert sent == [count for layer in rows for count in layer]

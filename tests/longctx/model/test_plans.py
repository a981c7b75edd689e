"""One plan a forward pass and kind of layer, for the tensors that layers really make."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from longctx.model.attention.core import AttentionShapes
from longctx.model.attention.kv_cache import KVCache
from longctx.model.attention.local import LocalAttention
from longctx.model.attention.mask import AttentionMask
from longctx.model.decoder import Decoder
from longctx.model.mixers.local_linear_attention import LocalLinearAttention
from longctx.model.training_pass import Execution
from tests.longctx.samples import dense_config, one_document, packed_batch

KINDS = {"layers": ("full", "window", "linear", "sparse"), "window": 3, "sparse_stride": 4, "num_layers": 8}


class Watching:
    """Notes which plans are made, and which a layer is given."""

    def __init__(self, *arguments: str) -> None:
        super().__init__(*arguments)
        self.made: list = []
        self.given: list = []

    def plan(self, mask, shapes, placement=None):
        self.made.append(super().plan(mask, shapes, placement))  # type: ignore[misc]
        return self.made[-1]

    def __call__(self, q_BtHD, k_BtKD, v_BtKV, *, plan, scores, **options):
        self.given.append((plan, AttentionShapes.of(q_BtHD, k_BtKD, v_BtKV, scores)))
        return super().__call__(q_BtHD, k_BtKD, v_BtKV, plan=plan, scores=scores, **options)  # type: ignore[misc]


class WatchingLocal(Watching, LocalAttention):
    pass


class WatchingLinear(Watching, LocalLinearAttention):
    pass


@pytest.mark.parametrize("keep", ["all", "attention"])
def test_a_forward_pass_makes_one_plan_for_each_kind_and_recomputation_none(keep):
    core, linear_core = WatchingLocal(), WatchingLinear()
    decoder = Decoder(dense_config(**KINDS), {"softmax": core, "linear": linear_core}, execution=Execution(keep))
    batch = packed_batch([[5, 7]])
    for passes in (1, 2):
        decoder(batch.tokens, batch.positions, batch.cu_seqlens).sum().backward()
        assert (len(core.made), len(linear_core.made)) == (3 * passes, passes)
    runs = 2 * (1 + (keep != "all"))  # layers of a kind, and each again in backward
    for watched in (core, linear_core):
        assert Counter(id(plan) for plan, _ in watched.given) == {id(plan): runs for plan in watched.made}


CONFIGS = {
    "grouped": {},
    "soft cap": {"attention_softcap": 5.0},
    "ALiBi": {"position": "alibi"},
    "T5": {"position": "t5"},
    "relative": {"position": "relative"},
    "latent": {"kv_lora_rank": 12, "rope_head_dim": 4, "value_head_dim": 6, "num_kv_heads": 4},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONFIGS)
def test_plans_are_for_the_tensors_that_layers_make(name, dtype):
    core, batch = WatchingLocal("reference"), one_document(2, 9)
    decoder = Decoder(dense_config(**CONFIGS[name]), {"softmax": core}).to(dtype)
    decoder(batch.tokens, batch.positions)
    assert {shapes for _, shapes in core.given} == {core.made[0].shapes}


def test_a_plan_is_for_its_own_tensors_alone():
    core, mask = LocalAttention(), AttentionMask((0, 6))
    q = torch.randn(1, 6, 2, 4)
    shapes = AttentionShapes(
        batch=1,
        tokens=6,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        value_dim=4,
        dtype=q.dtype,
        device_type="cpu",
        scale=0.5,
    )
    plan = core.plan(mask, shapes)
    core(q, q, q, plan=plan)
    for other in (q[:, :5], q[:, :, :1], q.double()):
        with pytest.raises(ValueError, match="plan again"):
            core(other, other, other, plan=plan)


@pytest.mark.parametrize("layers", [("full",), ("linear",)])
def test_a_cache_knows_how_many_tokens_came(layers):
    decoder, batch, cache = Decoder(dense_config(layers=layers)), one_document(1, 9), KVCache()
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        assert cache.num_tokens == start
        decoder(batch.tokens[:, start:stop], batch.positions[:, start:stop], cache=cache)
    assert [cache.layer(layer).num_tokens for layer in range(decoder.config.num_layers)] == [9, 9]

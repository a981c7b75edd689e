"""The decoder against transformers, against itself in parts, and its weights."""

from __future__ import annotations

import pytest
import torch

from longctx.model.decoder import Decoder
from longctx.model.experts.replay import RoutingReplay
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.causal_lm import CausalLM
from tests.longctx.samples import (
    dense_config,
    documents_of,
    gradients,
    packed_batch,
    step_loss,
    tiny_config,
)
from tests.rounding import both_ways

CONFIGS = {
    "moe": tiny_config(),
    "moe, raw gates, untied, no bias": tiny_config(normalize_gates=False, tie_embeddings=False, qkv_bias=False),
    "moe, no shared expert": tiny_config(shared_ffn_size=0),
    "dense": dense_config(),
    "dense, untied, no bias": dense_config(tie_embeddings=False, qkv_bias=False),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_equal_documents_alone(name):
    batch = packed_batch([[5, 11, 1], [16, 1]], padding=3)
    model = CausalLM(Decoder(CONFIGS[name])).double()
    whole = model.loss_sum(model(batch))
    step_loss(whole, 0.5).backward()
    packed = gradients(model)
    model.zero_grad()
    losses = [model.loss_sum(model(part)) for part in documents_of(batch)]
    sum(step_loss(loss, 0.5) for loss in losses[:3] + losses[4:6]).backward()  # 3 and 6 are padding
    torch.testing.assert_close(whole["nll"], sum(loss["nll"] for loss in losses))
    if CONFIGS[name].num_experts:
        torch.testing.assert_close(whole["balance"], sum(loss["balance"] for loss in losses[:3] + losses[4:6]))
    torch.testing.assert_close(gradients(model), packed)


def test_documents_may_be_left_out_when_the_tokens_are_the_whole():
    batch, decoder = packed_batch([[4, 6], [10]]), Decoder(tiny_config())
    given = decoder(batch.tokens, batch.positions, batch.cu_seqlens, document_ids=batch.document_ids, return_stats=True)
    inferred = decoder(batch.tokens, batch.positions, batch.cu_seqlens.tolist(), return_stats=True)
    torch.testing.assert_close(inferred, given, rtol=0, atol=0)
    assert len(given[1]) == 2
    with pytest.raises(ValueError, match="document_ids"):
        decoder(batch.tokens[:, :5], batch.positions[:, :5], batch.cu_seqlens, return_stats=True)
    rows = decoder(batch.tokens, batch.positions, return_stats=True)[1]
    assert rows[0].counts_SE.sum(1).tolist() == [20, 20]
    assert Decoder(dense_config())(batch.tokens, batch.positions, return_stats=True)[1] == []


def test_initial_weights_depend_on_seed_and_name_alone():
    state = torch.get_rng_state()
    config = tiny_config()
    first, again, other = Decoder(config), Decoder(config, seed=None), Decoder(config, seed=1)
    again.initialize(0)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert name.endswith(("norm.weight", ".bias")) or not torch.equal(a, c)
    smaller = dict(Decoder(tiny_config(vocab_size=50)).named_parameters())
    assert torch.equal(smaller["model.layers.1.mlp.experts.down_proj"], first.model.layers[1].mlp.experts.down_proj)
    assert not torch.equal(first.model.layers[0].self_attn.q_proj.weight, first.model.layers[1].self_attn.q_proj.weight)


def test_a_tied_head_owns_nothing_and_says_what_it_reads():
    tied, untied = Decoder(tiny_config()), Decoder(tiny_config(tie_embeddings=False))
    assert "lm_head.weight" not in tied.state_dict()
    assert "lm_head.weight" in untied.state_dict()
    assert tied.external_parameters() == [(tied.lm_head, tied.model.embed_tokens.weight)]
    assert untied.external_parameters() == []


@both_ways
@pytest.mark.parametrize("name", ["moe", "dense"])
def test_bfloat16_is_close_to_float32(name, products):
    """Loss and gradient norm; forward and backward, two layers round 80 numbers or so one after the other: 2 %.

    The choice of experts is that of float32: a token whose choice rounding turns would see another expert.
    """
    batch = packed_batch([[9, 14], [20, 3]], padding=1)
    results, replay = {}, RoutingReplay()
    for dtype in (torch.float32, torch.bfloat16):
        model = CausalLM(Decoder(CONFIGS[name], execution=Execution(matmul_mode=products))).to(dtype)
        training_pass = TrainingPass(replay=replay if name == "moe" else None)
        loss = model.loss_sum(model(batch, training_pass))
        step_loss(loss, 0.1).backward()
        assert {total.dtype for total in loss.sums.values()} == {torch.float32}
        assert {g.dtype for g in gradients(model).values()} == {dtype}
        norm = torch.cat([g.double().flatten() for g in gradients(model).values()]).norm()
        results[dtype] = torch.stack([loss["nll"].double(), norm])
        replay = RoutingReplay(replay.experts_LNk) if name == "moe" else replay
    torch.testing.assert_close(results[torch.bfloat16], results[torch.float32], rtol=2e-2, atol=0)

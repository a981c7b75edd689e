"""The decoder against transformers, against itself in parts, and its weights."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from longctx.architecture.rope import Rope
from longctx.model.attention.cache import LocalKVCache
from longctx.model.attention.local import LocalAttention
from longctx.model.decoder import Decoder, external_parameters
from longctx.model.experts.replay import RoutingReplay
from longctx.model.layers.norms import RMSNorm
from longctx.model.rotary import apply_rotary, rotary_table
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.causal_lm import CausalLM
from tests.longctx.samples import (
    dense_config,
    documents_of,
    gradients,
    one_document,
    packed_batch,
    randomize,
    step_loss,
    tiny_config,
)
from tests.rounding import UNIT, both_ways

CONFIGS = {
    "moe": tiny_config(),
    "moe, raw gates, untied, no bias": tiny_config(normalize_gates=False, tie_embeddings=False, qkv_bias=False),
    "moe, no shared expert": tiny_config(shared_ffn_size=0),
    "dense": dense_config(),
    "dense, untied, no bias": dense_config(tie_embeddings=False, qkv_bias=False),
}


def hf_model(config, attention):
    transformers = pytest.importorskip("transformers")
    shared = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "tie_word_embeddings": config.tie_embeddings,
        "attn_implementation": attention,
    }
    if config.num_experts:
        sparse = transformers.Qwen2MoeConfig(
            **shared,
            qkv_bias=config.qkv_bias,
            num_experts=config.num_experts,
            num_experts_per_tok=config.experts_per_token,
            moe_intermediate_size=config.expert_ffn_size,
            shared_expert_intermediate_size=config.shared_ffn_size,
            norm_topk_prob=config.normalize_gates,
            decoder_sparse_step=1,
        )
        return transformers.Qwen2MoeForCausalLM(sparse)
    dense = {**shared, "intermediate_size": config.ffn_size}
    if config.qkv_bias:
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**dense))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**dense))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "moe, no shared expert"])
def test_same_logits_loss_and_gradients_as_transformers(name, attention):
    config, batch = CONFIGS[name], one_document(2, 24)
    model, theirs = CausalLM(Decoder(config)), hf_model(config, attention)
    randomize(model, std=0.2)
    decoder = model.network
    kept = theirs.load_state_dict(decoder.state_dict(), strict=False)
    assert kept.missing_keys == (["lm_head.weight"] if config.tie_embeddings else [])
    assert kept.unexpected_keys == []

    output = theirs(batch.tokens, labels=batch.tokens, use_cache=False)
    logits = decoder.logits(decoder(batch.tokens, batch.positions))
    torch.testing.assert_close(logits, output.logits, atol=1e-5, rtol=1e-5)

    output.loss.backward()
    (model.loss_sum(model(batch))["objective"] / batch.num_targets).backward()
    loss = model(batch)[0] / batch.num_targets
    torch.testing.assert_close(loss, output.loss, atol=1e-5, rtol=1e-5)
    wanted = gradients(theirs)
    for parameter, grad in gradients(decoder).items():
        torch.testing.assert_close(
            grad, wanted[parameter], atol=2e-6, rtol=1e-4, msg=lambda m, p=parameter: f"{p}: {m}"
        )


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
    torch.testing.assert_close(whole["balance"], sum(loss["balance"] for loss in losses[:3] + losses[4:6]))
    torch.testing.assert_close(gradients(model), packed)


def test_positions_are_read_and_not_counted():
    """Rows in any order of tokens give the same hidden states when positions travel along."""
    shuffled = torch.tensor([3, 0, 2, 1])

    class Unmasked(LocalAttention):
        def __call__(self, q_BtHD, k_BtKD, v_BtKD, **_):
            q, k, v = (x.transpose(1, 2) for x in (q_BtHD, k_BtKD, v_BtKD))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    decoder = Decoder(tiny_config(), {"softmax": Unmasked()}).double()
    tokens, positions = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[10, 11, 12, 1_000_000]])
    hidden = decoder(tokens, positions)
    torch.testing.assert_close(decoder(tokens[:, shuffled], positions[:, shuffled]), hidden[:, shuffled])
    assert not torch.allclose(decoder(tokens, positions.flip(1)), hidden)


def test_rotary_depends_on_distance_alone_also_at_ten_million():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 64)
    near, far = (
        [apply_rotary(x, *rotary_table(torch.tensor([[p + d]]), Rope(), 64, x.dtype)) for x, d in ((q, 37), (k, 0))]
        for p in (0, 10_000_000)
    )
    torch.testing.assert_close((near[0] * near[1]).sum(), (far[0] * far[1]).sum(), atol=1e-4, rtol=0)


def test_norm_statistics_are_float32_in_bfloat16():
    torch.manual_seed(0)
    norm, x = RMSNorm(256, eps=1e-6), (torch.randn(4, 256) * 30).bfloat16()
    randomize(norm)
    norm.bfloat16()
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6) * norm.weight.double()
    # half a step of the final rounding, and what float32 makes of it
    torch.testing.assert_close(norm(x).double(), exact, rtol=UNIT + 1e-6, atol=0)


@pytest.mark.parametrize("name", ["moe", "dense"])
def test_recompute_changes_no_bit(name):
    batch = packed_batch([[9, 14], [20, 3]], padding=1)
    results = {}
    for keep in ("all", "attention"):
        model = CausalLM(Decoder(CONFIGS[name], execution=Execution(keep)))
        loss = model.loss_sum(model(batch))
        step_loss(loss, 0.1).backward()
        results[keep] = (*loss.tensors(), *gradients(model).values())
    torch.testing.assert_close(results["attention"], results["all"], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["moe", "dense"])
def test_decoding_with_a_cache_equals_one_forward(name):
    batch, decoder = one_document(2, 30), Decoder(CONFIGS[name])
    with torch.no_grad():
        whole = decoder.logits(decoder(batch.tokens, batch.positions))
        cache, steps = LocalKVCache(), []
        for a, b in [(0, 13), (13, 14), (14, 15), (15, 30)]:
            steps.append(decoder(batch.tokens[:, a:b], batch.positions[:, a:b], cache=cache))
        torch.testing.assert_close(decoder.logits(torch.cat(steps, 1)), whole)


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


def test_initial_weights_have_the_asked_spread():
    config = tiny_config(hidden_size=128, num_layers=8)
    for name, p in Decoder(config).named_parameters():
        if "norm" in name:
            assert torch.equal(p, torch.ones_like(p))
        elif name.endswith(".bias"):
            assert torch.equal(p, torch.zeros_like(p))
        elif p.numel() > 2000:
            wanted = 0.1 / 4 if "o_proj" in name or "down_proj" in name else 0.1
            assert p.std().item() == pytest.approx(wanted, rel=0.1), name


def test_a_tied_head_owns_nothing_and_says_what_it_reads():
    tied, untied = Decoder(tiny_config()), Decoder(tiny_config(tie_embeddings=False))
    assert "lm_head.weight" not in tied.state_dict()
    assert "lm_head.weight" in untied.state_dict()
    assert external_parameters(tied) == [(tied.lm_head, tied.model.embed_tokens.weight)]
    assert external_parameters(untied) == []


@both_ways
@pytest.mark.parametrize("name", ["moe", "dense"])
def test_bfloat16_is_close_to_float32(name, products):
    """Loss and gradient norm; forward and backward, two layers round 80 numbers or so one after the other: 2 %.

    The choice of experts is that of float32: a token whose choice rounding turns would see another expert.
    """
    batch = packed_batch([[9, 14], [20, 3]], padding=1)
    results, replay = {}, RoutingReplay()
    for dtype in (torch.float32, torch.bfloat16):
        model = CausalLM(Decoder(CONFIGS[name], execution=Execution(products=products))).to(dtype)
        training_pass = TrainingPass(replay=replay if name == "moe" else None)
        loss = model.loss_sum(model(batch, training_pass))
        step_loss(loss, 0.1).backward()
        assert loss["nll"].dtype == loss["balance"].dtype == torch.float32
        assert {g.dtype for g in gradients(model).values()} == {dtype}
        norm = torch.cat([g.double().flatten() for g in gradients(model).values()]).norm()
        results[dtype] = torch.stack([loss["nll"].double(), norm])
        replay = RoutingReplay(replay.experts_LNk) if name == "moe" else replay
    torch.testing.assert_close(results[torch.bfloat16], results[torch.float32], rtol=2e-2, atol=0)


def test_loss_without_the_whole_logits_is_cross_entropy():
    batch, decoder = packed_batch([[9, 14]], padding=2), Decoder(tiny_config())
    hidden = decoder(batch.tokens, batch.positions, batch.cu_seqlens)
    wanted = cross_entropy(decoder.logits(hidden).flatten(0, 1), batch.targets.flatten(), reduction="none")
    torch.testing.assert_close(decoder.token_nll(hidden, batch.targets), wanted.detach().view(1, -1))
    torch.testing.assert_close(decoder.loss_sums(hidden, batch.targets), (wanted.sum(), wanted.sum()))

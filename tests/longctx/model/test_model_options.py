"""Norms, their orders, scales and caps: against transformers and against a decoder by definition."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from longctx.config import ModelConfig
from longctx.model.decoder import Decoder
from longctx.model.layers.norms import RMSNorm
from longctx.model.rotary import sinusoidal_embedding
from longctx.model.training_pass import Execution
from longctx.objectives.causal_lm import CausalLM
from tests.longctx.model.plain_decoder import PlainDecoder
from tests.longctx.model.test_positions import check_against_definition, odd_config
from tests.longctx.samples import packed_batch, randomize, tiny_config
from tests.rounding import UNIT, both_ways, rounded

OPTIONS = {
    "post": {"norm_order": "post"},
    "sandwich": {"norm_order": "sandwich"},
    "offset": {"norm_offset": True},
    "layernorm": {"norm": "layernorm"},
    "layernorm, post": {"norm": "layernorm", "norm_order": "post"},
    "a large epsilon": {"norm_eps": 0.5},
    "norm of each head": {"qk_norm": "head"},
    "norm of all heads": {"qk_norm": "full"},
    "norm of each head, offset": {"qk_norm": "head", "norm_offset": True},
    "norm of all heads, layernorm": {"qk_norm": "full", "norm": "layernorm"},
    "residual scale": {"residual_scale": 0.3},
    "residual scale, post": {"residual_scale": 0.3, "norm_order": "post"},
    "residual scale, sandwich": {"residual_scale": 0.3, "norm_order": "sandwich"},
    "embedding scale": {"embedding_scale": 14**0.5},
    "embedding scale, learned": {"embedding_scale": 3.0, "position": "learned"},
    "attention scale": {"attention_scale": 1.3},
    "soft cap": {"attention_softcap": 0.7},
    "soft cap and scale": {"attention_softcap": 0.7, "attention_scale": 2.0},
    "soft cap under a bias": {"attention_softcap": 0.7, "position": "t5", "relative_max_distance": 40},
    "soft cap under slopes": {"attention_softcap": 0.7, "position": "alibi"},
    "soft cap of relative positions": {"attention_softcap": 0.7, "position": "relative"},
    "sinks": {"sinks": True},
    "windows": {"layers": ("window", "full"), "window": 3},
    "biases": {"qkv_bias": True, "o_bias": True, "ffn_bias": True},
    "no biases": {"qkv_bias": False},
    "plain activation": {"activation": "gelu_tanh"},
    "gemma 2": {
        "norm_order": "sandwich",
        "norm_offset": True,
        "embedding_scale": 14**0.5,
        "attention_softcap": 2.0,
        "attention_scale": 0.4,
        "layers": ("window", "full"),
        "window": 4,
        "qkv_bias": False,
    },
    "gpt 2": {
        "norm": "layernorm",
        "position": "learned",
        "activation": "gelu_tanh",
        "o_bias": True,
        "ffn_bias": True,
        "num_kv_heads": 3,
    },
}


def build(execution: Execution | None = None, **changes) -> Decoder:
    decoder = Decoder(odd_config(**changes), execution=execution).double()
    randomize(decoder)
    return decoder


@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_equal_the_definition(name):
    check_against_definition(build(**OPTIONS[name]), packed_batch([[5, 11, 1], [16, 1]], vocab_size=31))


# Norms against transformers


def hf_norms():
    gemma = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    return {True: gemma.Gemma2RMSNorm, False: llama.LlamaRMSNorm}


@pytest.mark.parametrize("offset", [True, False])
def test_rms_norm_in_bfloat16_is_the_float32_result_rounded_once(offset):
    torch.manual_seed(0)
    norm = RMSNorm(256, eps=1e-6, offset=offset)
    randomize(norm, std=0.02 if offset else 1.0)  # of 1 + 0.02 bfloat16 keeps two bits
    norm.bfloat16()
    x = (torch.randn(64, 256) * 30).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * (norm.weight.double() + offset)
    out = norm(x)
    assert out.dtype == torch.bfloat16
    # half a unit in the last place, and 1e-6 of what float32 makes of it
    assert ((out.double() - exact).abs() <= exact.abs() * (UNIT + 1e-6)).all()
    if offset:
        theirs = hf_norms()[True](256)
        theirs.weight.data = norm.weight.detach().clone()
        differing = (theirs(x) != out).float().mean()
        assert differing < 1e-3  # where float32 results lie on two sides of a rounding boundary


# The head


def logits_by_definition(decoder: Decoder, batch):
    config, plain = decoder.config, PlainDecoder(decoder)
    weight = plain.weights["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
    logits = plain(batch.tokens, batch.positions, batch.cu_seqlens) @ weight.T * config.logit_scale
    cap = config.logit_softcap
    return cap * torch.tanh(logits / cap) if cap else logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("scale", "cap"), [(0.25, 0.0), (1.0, 1.5), (0.25, 1.5)])
def test_logits_are_scaled_and_then_capped(tied, scale, cap):
    decoder = build(tie_embeddings=tied, logit_scale=scale, logit_softcap=cap)
    batch = packed_batch([[5, 11, 1]], vocab_size=31)
    found = decoder.logits(decoder(batch.tokens, batch.positions, batch.cu_seqlens))
    torch.testing.assert_close(found, logits_by_definition(decoder, batch), atol=1e-12, rtol=1e-10)
    plain = build(tie_embeddings=tied)
    assert not torch.allclose(plain.logits(plain(batch.tokens, batch.positions, batch.cu_seqlens)), found)


def test_embeddings_are_scaled_in_the_model_s_dtype():
    """As Gemma was trained: the root of 14 is rounded to bfloat16 before it multiplies."""
    decoder = Decoder(odd_config(embedding_scale=14**0.5, position="sinusoidal")).bfloat16()
    tokens, positions = torch.arange(9)[None], torch.arange(9)[None]
    table = decoder.model.embed_tokens.weight.detach()
    wanted = table[tokens] * torch.tensor(14**0.5).bfloat16()
    wanted = wanted + sinusoidal_embedding(positions, 14, torch.bfloat16).bfloat16()
    assert torch.equal(decoder.model._embed(decoder.model._scaled(table[tokens]), positions, None, None), wanted)


# Initial weights

INITIAL = {
    "gpt": {"norm": "layernorm", "position": "learned", "o_bias": True, "ffn_bias": True, "qk_norm": "head"},
    "gemma": {"norm_offset": True, "norm_order": "sandwich", "qk_norm": "full"},
    "t5": {"position": "t5", "sinks": True, "norm_order": "post"},
    "relative": {"position": "relative", "tie_embeddings": False},
    "experts": {
        "num_experts": 4,
        "shared_ffn_size": 24,
        "router_bias": True,
        "expert_bias": True,
        "selection_bias": True,
        "score_function": "sigmoid",
    },
    "latent": {"kv_lora_rank": 12, "q_lora_rank": 10, "rope_head_dim": 4, "num_kv_heads": 4, "norm_offset": True},
}


@pytest.mark.parametrize("name", INITIAL)
def test_initial_weights_are_those_that_training_starts_from(name):
    changes = INITIAL[name]
    config = tiny_config(**{"num_experts": 0, "shared_ffn_size": 0, "hidden_size": 64, "init_std": 0.05, **changes})
    decoder = Decoder(config)
    for parameter, value in decoder.named_parameters():
        if parameter.endswith("norm.weight"):
            assert (value == (0 if config.norm_offset else 1)).all(), parameter
        elif parameter.endswith(("bias", "sinks.weight", "relative_bias.weight")):
            assert not value.any(), parameter
        else:
            writes = "o_proj" in parameter or "down_proj" in parameter
            std = 0.05 / (2 * config.num_layers) ** 0.5 if writes else 0.05
            error = 5 / value.numel() ** 0.5
            assert abs(value.std().item() / std - 1) < error, parameter
            assert abs(value.mean().item() / std) < error, parameter
    for buffer, value in decoder.named_buffers():
        assert not value.any(), buffer


@both_ways
def test_a_whole_model_in_bfloat16_is_as_near_as_bfloat16_is(products):
    """Every option at once: nothing falls back to float32 weights, nothing overflows.

    A layer rounds at most 30 times on the way through it, in either way, since linear layers hand bfloat16 on in both:
    eleven weights, four norms, queries and keys and their turn, attention's weights and output, its projection, two
    sums with what goes round it, gate and up, the activation in two steps, the projection after it. Residuals and norms
    pass relative errors on as they are.
    """
    for name in ("gemma 2", "gpt 2", "soft cap under a bias", "norm of all heads, layernorm"):
        decoder = build(Execution(matmul_mode=products), **OPTIONS[name])
        batch = packed_batch([[5, 11, 1]], vocab_size=31)
        exact = decoder(batch.tokens, batch.positions, batch.cu_seqlens)
        model = CausalLM(decoder.bfloat16())
        found = decoder(batch.tokens, batch.positions, batch.cu_seqlens)
        assert found.dtype == torch.bfloat16
        error = (found.double() - exact).norm() / exact.norm()
        assert error < rounded(30 * decoder.config.num_layers), name
        model(batch)[0].backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_every_field_is_read_by_the_model():
    """A field that nothing reads would be an option without effect."""
    from pathlib import Path

    import longctx.model

    folder = Path(longctx.model.__file__).parent
    others = (path for part in ("kernels", "architecture/mixers") for path in folder.parent.glob(f"{part}/**/*.py"))
    sources = "".join(path.read_text() for path in [*folder.rglob("*.py"), *others])
    config = (folder.parent / "architecture" / "fields.py").read_text()
    objective = "".join(p.read_text() for p in (folder.parent / "objectives").glob("*.py"))
    elsewhere = {"balance_loss_weight", "selection_bias_rate"}  # of whoever adds up the loss and takes the step
    for field in fields(ModelConfig):
        read = f"config.{field.name}" in sources + objective or f"self.{field.name}" in config
        assert read or field.name in elsewhere, field.name

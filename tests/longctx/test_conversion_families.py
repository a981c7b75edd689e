"""Configs: what this decoder cannot be is refused by name, what it can be survives both ways."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.config import ModelConfig
from longctx.conversion.families import FAMILIES, config_to_hf, family_of, tensor_specs
from longctx.errors import ConfigError
from longctx.model.decoder import Decoder
from longctx.presets import PRESETS
from longctx.rope import Rope
from tests.longctx.samples import dense_config, tiny_config

CONFIGS = {
    "qwen2_moe": tiny_config(tie_embeddings=False, rope=Rope(theta=5e5), balance_loss_weight=0.02, norm_eps=1e-5),
    "qwen2": dense_config(expert_ffn_size=128),  # a dense config.json has no place for it: the default comes back
    "llama": dense_config(expert_ffn_size=128, qkv_bias=False, init_std=0.01),
}
LLAMA = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back(name):
    config = CONFIGS[name]
    hf = config.to_hf()
    assert hf["model_type"] == name
    assert ModelConfig.from_hf(json.loads(json.dumps(hf))) == config


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_family_and_the_decoders_tensors(preset):
    config = PRESETS[preset]
    assert ModelConfig.from_hf(config.to_hf()) == config
    shapes = {name: tuple(p.shape) for name, p in Decoder(config, seed=None).state_dict().items()}
    assert {spec.name: spec.shape for spec in tensor_specs(config)} == shapes


@settings(max_examples=60, deadline=None)
@given(
    experts=st.integers(0, 5), bias=st.booleans(), tied=st.booleans(), norm=st.booleans(), heads=st.integers(1, 4),
    kv=st.sampled_from([1, None]), theta=st.floats(1, 1e8), layers=st.integers(1, 3),
)  # fmt: skip
def test_parts_cover_each_parameter_once(experts, bias, tied, norm, heads, kv, theta, layers):
    config = tiny_config(
        num_experts=experts, experts_per_token=min(1, experts) or 2, qkv_bias=bias, tie_embeddings=tied,
        normalize_gates=norm, num_heads=heads, num_kv_heads=kv or heads, rope=Rope(theta=theta), num_layers=layers,
        hidden_size=8 * heads,
    )  # fmt: skip
    back = ModelConfig.from_hf(config.to_hf())
    assert tensor_specs(back) == tensor_specs(config)
    assert (back.rope.theta, back.tie_embeddings) == (theta, tied)
    names = [part.name for spec in tensor_specs(config) for part in spec.layouts[0]]
    assert len(set(names)) == len(names)
    for spec in tensor_specs(config):
        for layout in spec.layouts:
            assert sum(_numel(part.shape) for part in layout) == _numel(spec.shape)


def _numel(shape: tuple[int, ...]) -> int:
    return shape[0] * _numel(shape[1:]) if shape else 1


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_the_config_as_we_meant_it(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    theirs = transformers.AutoConfig.from_pretrained(str(tmp_path), local_files_only=True)
    assert theirs.rope_parameters == {"rope_type": "default", "rope_theta": config.rope.theta}
    assert theirs.head_dim == config.head_dim
    theirs.save_pretrained(tmp_path / "again")
    assert ModelConfig.from_hf(json.loads((tmp_path / "again" / "config.json").read_text())) == config


def test_absent_keys_mean_what_transformers_takes_for_them():
    config = ModelConfig.from_hf(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 8, 10_000.0)
    assert not config.tie_embeddings
    moe = {k: v for k, v in tiny_config().to_hf().items() if k not in ("norm_topk_prob", "qkv_bias")}
    assert not ModelConfig.from_hf(moe).normalize_gates
    assert ModelConfig.from_hf(moe).qkv_bias


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2'.*llama"),
        ({"model_type": None}, "model_type=None"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling=.*yarn.*default"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling=.*linear"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_parameters=.*llama3"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e4}, "contradicts"),
        ({"rope_theta": 0}, "rope_theta=0"),
        ({"rope_theta": True}, "rope_theta=True"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25.*1.0"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*silu"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1.*0.0"),
        ({"attention_bias": True}, "attention_bias=True.*False"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types=.*full_attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5 .*int"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True .*int"),
        ({"vocab_size": None}, "vocab_size=None"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 .*bool"),
        ({"num_key_value_heads": 3}, "does not divide"),
    ],
)
def test_what_the_decoder_cannot_be_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_hf(LLAMA | change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2.*1"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\].*\[\]"),
        ({"use_sliding_window": True}, "use_sliding_window=True.*False"),
        ({"num_experts_per_tok": 9}, "experts_per_token=9"),
    ],
)
def test_what_the_mixture_cannot_be_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_hf(tiny_config().to_hf() | change)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"])
def test_sizes_are_required(key):
    with pytest.raises(ConfigError, match=f"no {key}"):
        ModelConfig.from_hf({k: v for k, v in LLAMA.items() if k != key})


def test_a_window_that_is_not_used_does_not_matter():
    hf = tiny_config().to_hf() | {
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": ["full_attention"] * 2,
    }
    assert ModelConfig.from_hf(hf) == tiny_config()


def test_shapes_without_a_family_are_refused():
    with pytest.raises(ConfigError, match="shared_ffn_size"):
        tiny_config(shared_ffn_size=0).to_hf()
    with pytest.raises(ConfigError, match="hidden_size=33"):
        dense_config(qkv_bias=False, num_heads=3, num_kv_heads=1, hidden_size=32).to_hf()


def test_families_of_one_shape():
    config = CONFIGS["qwen2"]
    assert family_of(config).model_type == "qwen2"
    assert family_of(config, model_type="seed_oss").model_type == "seed_oss"
    assert family_of(config, model_type="llama").model_type == "qwen2"
    hf = config_to_hf(config, own_tokenizer=True)
    assert hf["model_type"] == "seed_oss"
    assert ModelConfig.from_hf(hf) == config
    with pytest.raises(ConfigError, match=r"residual_dropout=0\.1"):
        ModelConfig.from_hf({k: v for k, v in hf.items() if k != "residual_dropout"})


def test_every_fixed_key_has_a_default_that_we_write():
    for family in FAMILIES.values():
        assert all(supported and supported[0] is not None for supported in family.only.values())

"""Configs: what this decoder cannot be is refused by name, what it can be survives both ways."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.architecture.fields import names_of_role
from longctx.architecture.rope import Rope
from longctx.config import PRESETS, ModelConfig
from longctx.conversion.tensor_layouts import parameter_shapes, tensor_specs
from longctx.errors import ConfigError
from longctx.families import FAMILIES, canonical_fields, config_to_hf, family_of
from longctx.families.spec import IGNORED_KEYS
from longctx.model.decoder import Decoder
from tests.longctx.families.hf_models import CASES, TWO_STACKS, VISION, WITH_CLASS, new_model
from tests.longctx.families.hub_configs import HUB, PARAMETERS
from tests.longctx.image_samples import igpt_config, swin_config, vit_config
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

OTHER_CLASSES = {"bert", "roberta", "albert", "bart", "marian", "t5"}
"""Types that transformers does not load as decoders."""
CHANGED_DEFAULTS: dict[str, dict[str, object]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "glm4_moe": {"head_dim": 128},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
}
"""Of classes whose defaults are no model, or one that is refused."""


@pytest.fixture(scope="module")
def hf_configs() -> dict[str, dict]:
    return {name: case.config_json() for name, case in (CASES | TWO_STACKS | VISION).items()}


class TestThereAndBack:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_ours(self, name):
        config = CONFIGS[name]
        hf = config.to_hf()
        assert hf["model_type"] == name
        assert ModelConfig.from_hf(json.loads(json.dumps(hf))) == config

    @pytest.mark.few(8)
    @pytest.mark.parametrize("preset", PRESETS)
    def test_every_preset_has_a_family_and_the_decoders_tensors(self, preset):
        config = PRESETS[preset]
        assert canonical_fields(ModelConfig.from_hf(config.to_hf())) == canonical_fields(config)
        assert {spec.name: spec.shape for spec in tensor_specs(config)} == parameter_shapes(config)

    @pytest.mark.parametrize("name", HUB)
    def test_published_models_are_read_whole(self, name):
        hf = HUB[name]
        config = ModelConfig.from_hf(hf)
        shapes = parameter_shapes(config)
        assert sum(math.prod(shape) for n, shape in shapes.items() if "correction_bias" not in n) == PARAMETERS[name]
        assert family_of(config, model_type=hf["model_type"]).model_type == hf["model_type"]
        again = json.loads(json.dumps(config_to_hf(config, model_type=hf["model_type"])))
        assert ModelConfig.from_hf(again) == config
        rewritten = {key for key in hf.keys() & again.keys() if hf[key] != again[key] and key not in SPELLED_OTHERWISE}
        assert not rewritten

    @pytest.mark.parametrize(
        ("hub", "preset"),
        [
            ("Llama-2-7b-hf", "llama-2-7b"), ("Llama-3.1-8B", "llama-3.1-8b"), ("Mixtral-8x7B-v0.1", "mixtral-8x7b"),
            ("Qwen3-30B-A3B", "qwen3-30b-a3b"), ("DeepSeek-V3", "deepseek-v3"), ("gpt2-xl", "gpt2-xl"),
            ("openai-gpt", "gpt-1"), ("bart-base", "bart-base"), ("opus-mt-en-de", "opus-mt"), ("t5-small", "t5-small"),
            ("t5-v1_1-base", "t5-v1.1-base"), ("imagegpt-small", "imagegpt-small"),
            ("vit-base-patch16-224", "vit-base-16"), ("swin-tiny-patch4-window7-224", "swin-tiny"),
        ],
    )  # fmt: skip
    def test_presets_are_what_was_published(self, hub, preset):
        assert canonical_fields(ModelConfig.from_hf(HUB[hub])) == canonical_fields(PRESETS[preset])

    @pytest.mark.few(12)
    @pytest.mark.parametrize("model_type", sorted(set(WITH_CLASS) - OTHER_CLASSES))
    def test_a_model_of_full_size_has_transformers_parameters(self, model_type):
        """The class's defaults are the sizes of a published model in most types; 30 layers and more show other faults
        than the three of a tiny one."""
        import transformers

        theirs = transformers.CONFIG_MAPPING[model_type](**CHANGED_DEFAULTS.get(model_type, {}))
        with torch.device("meta"):
            model = new_model(FAMILIES[model_type].auto_class, theirs)
        if hasattr(model, "pooler"):
            # A head for other tasks, which is left out.
            model.pooler = torch.nn.Identity()
        # A file has no more than what JSON says.
        config = ModelConfig.from_hf(json.loads(theirs.to_json_string(use_diff=False)))
        shapes, buffers = parameter_shapes(config), ("correction_bias", "layer_scalar")
        count = sum(math.prod(shape) for name, shape in shapes.items() if not name.endswith(buffers))
        assert count == sum(parameter.numel() for parameter in model.parameters())

    def test_gemma4_numbers_its_layers_with_zeros_before_them(self):
        """transformers' table of layers with heads of their own, in a model of more than ten."""
        import transformers

        theirs = transformers.CONFIG_MAPPING["gemma4_text"](**CHANGED_DEFAULTS["gemma4_text"])
        written = json.loads(theirs.to_json_string(use_diff=False))
        assert "05" in written["per_layer_config"]
        assert ModelConfig.from_hf(written).global_head_dim == 512
        written["per_layer_config"].pop("05")
        with pytest.raises(ConfigError, match=r"per_layer_config=.* is not supported"):
            ModelConfig.from_hf(written)

    @pytest.mark.parametrize("name", CASES | TWO_STACKS | VISION)
    def test_transformers_reads_the_config_as_we_meant_it(self, name, hf_configs, tmp_path):
        """Config of theirs → ours → config.json → transformers → config.json → ours."""
        import transformers

        config = ModelConfig.from_hf(hf_configs[name])
        written = config_to_hf(config, model_type=hf_configs[name]["model_type"])
        (tmp_path / "config.json").write_text(json.dumps(written))
        theirs = transformers.AutoConfig.from_pretrained(str(tmp_path), local_files_only=True)
        theirs.save_pretrained(tmp_path / "again")
        assert ModelConfig.from_hf(json.loads((tmp_path / "again" / "config.json").read_text())) == config

    # Gemma 4 has had no other keys.
    @pytest.mark.parametrize("name", [name for name in CASES | TWO_STACKS | VISION if not name.startswith("gemma4")])
    def test_transformers_4_keys_alone_say_the_same(self, name, hf_configs):
        config = ModelConfig.from_hf(hf_configs[name])
        written = config_to_hf(config, model_type=hf_configs[name]["model_type"])
        written.pop("rope_parameters", None)
        assert ModelConfig.from_hf(written) == config

    @pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gpt_oss", "qwen3 window"])
    @pytest.mark.parametrize(
        "layers", [("full",), ("window",), ("window", "full"), ("full", "window"), ("window", "window", "full")]
    )
    def test_any_pattern_of_windows(self, name, layers, hf_configs, tmp_path):
        import transformers

        hf = hf_configs[name]
        without = {} if "window" in layers else {"window": 0, "local_rope_theta": 0.0}
        config = dataclasses.replace(ModelConfig.from_hf(hf), layers=layers, **without)
        written = config_to_hf(config, model_type=hf["model_type"])
        back = ModelConfig.from_hf(written)
        assert canonical_fields(back) == canonical_fields(config)
        assert back.layers == layers
        (tmp_path / "config.json").write_text(json.dumps(written))
        theirs = transformers.AutoConfig.from_pretrained(str(tmp_path), local_files_only=True)
        kinds = {"full": "full_attention", "window": "sliding_attention"}
        assert theirs.layer_types == [kinds[config.layer_kind(n)] for n in range(config.num_layers)]


SPELLED_OTHERWISE = {
    *("rope_scaling", "max_window_layers", "sliding_window", "num_nextn_predict_layers", "attn_pdrop", "n_group"),
    *("topk_group", "torch_dtype", "use_cache", "attention_dropout", "activation_dropout", "architectures"),
    # Class names are in the format of images, and dropped branches are not supported.
    *("id2label", "label2id", "drop_path_rate"),
}
"""Keys that may change between a published config and ours: the same in other words, or left out on purpose."""


@settings(max_examples=30, deadline=None)
@given(
    experts=st.integers(0, 5), bias=st.booleans(), tied=st.booleans(), norm=st.booleans(), heads=st.integers(1, 4),
    kv=st.sampled_from([1, None]), theta=st.floats(2, 1e8), layers=st.integers(1, 3),
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
    check_cover(config, None)


@pytest.mark.parametrize("name", CASES | TWO_STACKS | VISION)
def test_parts_of_every_family_cover_each_parameter_once(name, hf_configs):
    config = ModelConfig.from_hf(hf_configs[name])
    check_cover(config, hf_configs[name]["model_type"])


def check_cover(config: ModelConfig, model_type: str | None) -> None:
    """Names on disk belong to one whole each, of which every parameter has rows of its own."""
    specs = tensor_specs(config, model_type=model_type)
    shapes = {name: tuple(p.shape) for name, p in Decoder(config, seed=None).state_dict().items()}
    assert {spec.name: spec.shape for spec in specs} == shapes
    wholes = {}
    for spec in specs:
        layout = spec.layouts[0]
        wholes.setdefault(layout.members, layout.parts)
        assert wholes[layout.members] == layout.parts
        # Without parts it is zero where no file has it.
        for layout in (layout for layout in spec.layouts if layout.parts):
            sizes = [math.prod(part.shape) for part in layout.parts]
            assert (
                sum(sizes)
                == math.prod(layout.combined_shape)
                == sum(math.prod(shapes[member]) for member in layout.members)
            )
            start, stop = layout.rows
            assert not layout.is_shared or stop - start == spec.shape[0]
    names = [part.name for parts in wholes.values() for part in parts]
    assert len(set(names)) == len(names)


def test_absent_keys_mean_what_transformers_takes_for_them():
    config = ModelConfig.from_hf(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 8, 10_000.0)
    assert not config.tie_embeddings
    moe = {k: v for k, v in tiny_config().to_hf().items() if k not in ("norm_topk_prob", "qkv_bias")}
    assert not ModelConfig.from_hf(moe).normalize_gates
    assert ModelConfig.from_hf(moe).qkv_bias


YARN = {"rope_type": "yarn", "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("change", "rope"),
    [
        ({"rope_scaling": YARN}, {"kind": "yarn", "factor": 4.0, "original_max_positions": 64}),
        (
            {"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 16}},
            {"kind": "yarn", "factor": 4.0, "original_max_positions": 16},
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"kind": "linear", "factor": 2.0}),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 5e5},
            {"kind": "dynamic", "factor": 2.0, "original_max_positions": 64, "theta": 5e5},
        ),
        (
            {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 32, "rope_theta": 1e6}},
            {
                "kind": "longrope", "factor": 2.0, "original_max_positions": 32, "theta": 1e6,
                "short_factor": (1.0,) * 4, "long_factor": (2.0,) * 4,
            },
        ),
        (
            {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},  # their ratio; scores are DeepSeek's alone
            {"kind": "yarn", "factor": 4.0, "original_max_positions": 64, "attention_factor": 1.0},
        ),
    ],
)  # fmt: skip
def test_stretched_ropes(change, rope):
    config = ModelConfig.from_hf(LLAMA | change)
    assert config.rope == Rope(**rope)
    assert ModelConfig.from_hf(config.to_hf()).rope == config.rope


def test_dynamic_stretching_starts_where_transformers_lets_it():
    config = dense_config(max_positions=512, rope=Rope(kind="dynamic", factor=4.0, original_max_positions=128))
    assert config.to_hf()["max_position_embeddings"] == 128
    assert canonical_fields(ModelConfig.from_hf(config.to_hf())) == canonical_fields(config)


def test_fixed_ntk_scaling_is_written_as_the_base_it_comes_to():
    config = dense_config(rope=Rope(kind="ntk", factor=4.0))
    back = ModelConfig.from_hf(config.to_hf()).rope
    assert back.kind == "default"
    assert back.frequencies(8) == pytest.approx(config.rope.frequencies(8), rel=1e-14)


@pytest.mark.parametrize(
    ("config", "family"),
    [(vit_config, "vit"), (swin_config, "swin"), (partial(igpt_config, norm="rmsnorm", norm_eps=1e-5), "imagegpt")],
)
def test_a_run_on_images_has_a_family(config, family):
    # A recipe's models are untied unless it says otherwise, and a model of pixels knows the images' shape.
    heads = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "tie_embeddings": False}
    dense = {"num_experts": 0, "shared_ffn_size": 0, "o_bias": True, "ffn_bias": True}
    config = config(**heads, **dense, activation="gelu", qkv_bias=True)
    assert family_of(config).model_type == family
    back = ModelConfig.from_hf(config.to_hf())
    assert canonical_fields(back) == canonical_fields(config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt_neox"}, "model_type='gpt_neox'.*llama"),
        ({"model_type": "gemma3"}, "does not read for a gemma3 model"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 4.0}}, "rope_scaling=.*proportional.*yarn"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "has no factor"),
        ({"rope_scaling": YARN | {"low_freq_factor": 2.0}}, "low_freq_factor.*not keys.*yarn"),
        ({"rope_scaling": YARN | {"type": "linear"}}, "rope_scaling=.*not supported"),
        ({"rope_scaling": YARN | {"factor": "4"}}, "factor='4'"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "contradicts"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}}, "=64"),
        ({"rope_scaling": LONGROPE | {"short_factor": [1.0] * 3, "factor": 2.0}}, "short_factor has 3 values"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}}, "low_freq_factor=None"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e4}, "contradicts"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention.*not keys"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\]"),
        ({"rope_theta": 0}, "rope_theta=0"),
        ({"original_max_position_embeddings": 32}, "original_max_position_embeddings=32"),
        (
            {
                "rope_scaling": LONGROPE | {"original_max_position_embeddings": 16},
                "original_max_position_embeddings": 32,
            },
            "contradicts.*32, but also 16",
        ),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25.*1.0"),
        ({"hidden_act": "relu6"}, "hidden_act='relu6'.*silu"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1.*0.0"),
        ({"attention_bias": 1}, "attention_bias=1 .*bool"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types=.*full_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types=.*a list of 2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5 .*int"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 .*bool"),
        ({"num_key_value_heads": 3}, "does not divide"),
    ],
)
def test_what_the_decoder_cannot_be_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_hf(LLAMA | change)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ("qwen2_moe", {"mlp_only_layers": [3]}, r"mlp_only_layers=\[3\]"),
        ("qwen2_moe", {"use_sliding_window": True, "layer_types": None}, "use_sliding_window=True.*layer_types"),
        ("qwen2_moe window", {"layer_types": ["sliding_attention", "full_attention"] * 2}, "layer_types"),
        ("qwen2_moe window", {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]}, "layer_types.*in all"),
        ("qwen2_moe", {"num_experts_per_tok": 9}, "experts_per_token=9"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0"),
        ("qwen2_moe", {"num_experts": 7, "num_local_experts": 6}, "contradicts.*num_local_experts"),
        ("qwen2", {"use_sliding_window": False}, "sliding_attention"),
        ("qwen2", {"sliding_window": 0}, "sliding_window=0"),
        ("qwen2", {"use_mrope": True}, "use_mrope=True"),
        ("seed_oss", {"residual_dropout": 0.1}, r"residual_dropout=0\.1"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types=.*sliding_attention in all"),
        ("mixtral", {"router_jitter_noise": 0.1}, r"router_jitter_noise=0\.1"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts=0"),
        ("olmoe", {"clip_qkv": 8.0}, r"clip_qkv=8\.0"),
        ("olmoe", {"head_dim": 12}, "head_dim=12"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma2", {"hidden_act": "silu"}, "hidden_act='silu'"),
        ("gemma2", {"sliding_window": None}, "sliding_window=None"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        ("gemma3_text", {"rope_local_base_freq": 7.0}, "contradicts"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}},
            "sliding_attention.*default",
        ),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, "tables full_attention"),
        ("gpt2", {"embd_pdrop": 0.2}, r"embd_pdrop.*0\.2.*the same"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("gpt2", {"n_head": 5}, "n_embd=32 .*n_head=5"),
        ("gpt2", {"n_ctx": 32}, "n_ctx=32"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ("deepseek_v2", {"head_dim": 12}, "head_dim=12 .*qk_rope_head_dim"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_kv_heads=2"),
        ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts=0"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"quantization_config": {"fmt": "e4m3"}}, "quantization_config"),
        ("gpt_oss", {"swiglu_limit": 5.0}, r"swiglu_limit=5\.0"),
        ("gpt_oss", {"experts_per_token": 3}, "contradicts"),
    ],
)
def test_what_other_families_cannot_be_is_refused(name, change, said, hf_configs):
    ModelConfig.from_hf(hf_configs[name])
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_hf(hf_configs[name] | change)


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


class TestUnsaid:
    """A decoder that no family can say is refused, naming the field; it is never written as another function."""

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"position": "alibi"}, "position"),
            ({"position": "t5"}, "position"),
            ({"position": "none"}, "position"),
            ({"rope_layers": (True, False)}, "rope_layers"),
            ({"residual_scale": 0.5}, "residual_scale"),
            ({"logit_scale": 0.5}, "logit_scale"),
            ({"embedding_scale": 2.0}, "embedding_scale"),
            ({"attention_scale": 0.5}, "attention_scale"),
            ({"attention_softcap": 5.0}, "attention_softcap"),
            ({"logit_softcap": 5.0}, "logit_softcap"),
            ({"norm_order": "post"}, "norm_order"),
            ({"norm_offset": True}, "norm_offset"),
            ({"norm": "layernorm"}, "norm"),
            ({"activation": "relu2"}, "activation"),
            ({"sinks": True}, "sinks"),
            ({"layers": ("linear",)}, "layers"),
            ({"layers": ("sparse",), "window": 4, "sparse_stride": 4}, "sparse_stride"),
            ({"rope": Rope(partial=0.5)}, "rope"),
            ({"rope": Rope(interleaved=True)}, "rope"),
            (
                {"rope": Rope(kind="yarn", factor=2.0, original_max_positions=64, mscale=1.0, mscale_all_dim=1.0)},
                "rope",
            ),
        ],
    )
    def test_of_a_dense_model(self, changes, field):
        with pytest.raises(ConfigError, match=rf"model\.{field}: "):
            dense_config(**changes).to_hf()

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"score_function": "sigmoid"}, "score_function"),
            ({"selection_bias": True}, "selection_bias"),
            ({"expert_groups": 2, "groups_per_token": 1}, "expert_groups"),
            ({"routed_scale": 2.0}, "routed_scale"),
            ({"router_bias": True}, "router_bias"),
            ({"expert_bias": True}, "expert_bias"),
            ({"shared_gate": False}, "shared_gate"),
        ],
    )
    def test_of_a_mixture(self, changes, field):
        with pytest.raises(ConfigError, match=rf"model\.{field}: "):
            tiny_config(**changes).to_hf()

    def test_shapes_without_a_family(self):
        with pytest.raises(ConfigError, match="no supported Hugging Face family"):
            tiny_config(shared_ffn_size=0).to_hf()

    def test_every_field_is_said_or_idle_or_of_training(self):
        """A field that is added to ModelConfig and forgotten here would be lost without a word."""
        said = set().union(*(canonical_fields(ModelConfig.from_hf(hf)) for hf in HUB.values()))
        said |= {"max_positions", "relative_buckets", "relative_max_distance"}  # of learned positions, and of t5
        said |= {"local_rope_theta"}  # part of what ``rope`` says of each layer
        assert {f.name for f in dataclasses.fields(ModelConfig)} == said | names_of_role("training")


def test_families_that_can_be_the_same_model():
    config = CONFIGS["qwen2"]
    assert family_of(config).model_type == "qwen2"
    assert family_of(config, model_type="seed_oss").model_type == "seed_oss"
    assert family_of(config, model_type="llama").model_type == "qwen2"
    hf = config_to_hf(config, own_tokenizer=True)
    assert hf["model_type"] == "seed_oss"
    assert ModelConfig.from_hf(hf) == config
    assert family_of(CONFIGS["llama"], model_type="mistral").model_type == "mistral"
    odd = dense_config(qkv_bias=False, num_heads=3, num_kv_heads=1, hidden_size=32)
    assert family_of(odd, model_type="llama").model_type == "mistral"  # transformers refuses such a llama
    with pytest.raises(ConfigError, match=r"residual_dropout=0\.1"):
        ModelConfig.from_hf({k: v for k, v in hf.items() if k != "residual_dropout"})


def test_no_rule_of_a_family_reads_another_ones_key():
    for family in FAMILIES.values():
        keys = [key for rule in family.rules for key in rule.keys]
        assert len(set(keys)) == len(keys), family.model_type
        # RoBERTa's padding id says where its positions begin, and a class head has as many rows as labels.
        ignored = (family.ignored_keys | IGNORED_KEYS) - {"pad_token_id", "id2label", "label2id"}
        assert not set(keys) & ignored, family.model_type

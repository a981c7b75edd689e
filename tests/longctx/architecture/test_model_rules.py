"""Each rule of ``ModelConfig`` refuses what it should, in words that help; what is accepted runs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longctx.architecture.fields import Role, names_of_role
from longctx.architecture.model_rules import CHOICES
from longctx.architecture.rope import ROPE_KINDS, Rope
from longctx.architecture.size import count_parameters
from longctx.config import PRESETS, ModelConfig
from longctx.errors import ConfigError
from longctx.model.decoder import Decoder
from longctx.model.training_pass import TrainingPass
from longctx.objectives.causal_lm import CausalLM
from tests.longctx.pairs import pair_batch
from tests.longctx.samples import ahead, gradients, packed_batch, step_loss, tiny_config

LATENT = {"kv_lora_rank": 6, "rope_head_dim": 4, "num_kv_heads": 4}

REFUSED = {
    # name: (fields, what the message says: the value, the rule, the nearest fit)
    "zero heads": ({"num_heads": 0}, "num_heads=0 must be at least 1"),
    "fraction": ({"hidden_size": 32.0}, "hidden_size=32.0 must be a whole number"),
    "truth for a number": ({"num_layers": True}, "num_layers=True must be a whole number"),
    "number for truth": ({"tie_embeddings": 1}, "tie_embeddings=1 must be true or false"),
    "word for a number": ({"norm_eps": "1e-6"}, "norm_eps='1e-6' must be a number"),
    "no list": ({"layers": "full"}, "layers='full' must be a list"),
    "mixed list": ({"dense_layers": (0, 0.5)}, r"dense_layers=\(0, 0.5\) must be a list .* whole number"),
    "no table": ({"rope": "yarn"}, "rope='yarn' must be a table of Rope's keys"),
    "not a number": ({"init_std": math.nan}, "init_std=nan must be a positive number"),
    "infinite": ({"attention_scale": math.inf}, "attention_scale=inf must not be negative"),
    "negative cap": ({"logit_softcap": -1.0}, "logit_softcap=-1.0 must not be negative; 0 disables it"),
    "no epsilon": ({"norm_eps": 0.0}, "norm_eps=0.0 must be a positive number"),
    "all dropped": ({"residual_dropout": 1.0}, "residual_dropout=1.0 must be at least 0 and below 1"),
    "heads": ({"num_kv_heads": 3}, r"num_kv_heads=3 does not divide model.num_heads=4.\nTry one of \[1, 2, 4\]"),
    "offset of layernorm": ({"norm": "layernorm", "norm_offset": True}, "norm_offset=true has no effect.*rmsnorm"),
    "layer kind": ({"layers": ("ful",)}, r"layers=\['ful'\] must list one or more of \['full', 'window'"),
    "no layer kind": ({"layers": ()}, r"layers=\[\] must list one or more"),
    "too many layers": ({"layers": ("full",) * 3}, "layers lists 3 layers"),
    "no rope layers": ({"rope_layers": ()}, "rope_layers lists 0 layers"),
    "no window": ({"layers": ("window",)}, "window=0 with .*at least 1.*Set it"),
    "idle window": ({"window": 8}, "window=8 with .*need at least 1. Try model.window=0"),
    "no stride": ({"layers": ("sparse",), "window": 3}, "sparse_stride=0 with .*Set it"),
    "idle stride": ({"sparse_stride": 8}, "sparse_stride=8 with .*Try model.sparse_stride=0"),
    "cap of linear layers": ({"layers": ("linear",), "attention_softcap": 2.0}, "attention_softcap=2.0 has no effect"),
    "bias of linear layers": ({"layers": ("linear",), "position": "alibi"}, "position='alibi' .*Try rope"),
    "sinks without scores": ({"layers": ("gated_delta",), "sinks": True}, "sinks=True applies to softmax layers"),
    "norms without scores": ({"layers": ("kda",), "qk_norm": "head"}, "qk_norm='head' applies to softmax layers"),
    "half latent": ({"rope_head_dim": 4}, "rope_head_dim=4 requires latent attention; set model.kv_lora_rank"),
    "latent heads": ({**LATENT, "num_kv_heads": 2}, "num_kv_heads=2 must equal model.num_heads=4"),
    "latent positions": ({**LATENT, "position": "alibi"}, "kv_lora_rank=6.*use model.position=rope"),
    "latent rotary channels": ({**LATENT, "rope_head_dim": 8}, "rope_head_dim=8 must be above 0 and below .*Try 2"),
    "latent odd rotary channels": ({**LATENT, "rope_head_dim": 3}, "3 rotary channels.*even.*model.rope_head_dim"),
    "odd rotary channels": ({"rope": Rope(partial=0.4)}, "3 rotary channels per head"),
    "longrope factors": (
        {"rope": Rope(kind="longrope", original_max_positions=8, short_factor=(1.0,))},
        "short_factor has 1 values; longrope needs 4",
    ),
    "rope without rope": ({"position": "none", "rope": Rope(theta=1e6)}, "model.rope configures rotary positions"),
    "rope layers without rope": ({"position": "t5", "rope_layers": (True, False)}, "rope_layers configures rotary"),
    "local base without rope": ({"position": "t5", "local_rope_theta": 10.0}, "local_rope_theta configures rotary"),
    "local base without windows": ({"local_rope_theta": 10.0}, "local_rope_theta=10.0 applies to window layers"),
    "local base too small": ({"local_rope_theta": 1.0, "layers": ("window",), "window": 2}, "local_rope_theta=1"),
    "odd sines": ({"position": "sinusoidal", "hidden_size": 33}, "hidden_size=33 must be even.*Try 34"),
    "odd halves": ({"position": "sinusoidal_halves", "hidden_size": 33}, "hidden_size=33 must be even.*Try 34"),
    "odd sines of narrow tables": (
        {"position": "sinusoidal", "embedding_size": 5, "head_transform": True, "num_experts": 0, "activation": "gelu"},
        "embedding_size=5 must be even.*Try 6",
    ),
    "pairs of a causal model": ({"pair_head": "nsp", "segments": 2}, "model.causal=false .now true.*segments=2 .now 2"),
    "pairs of one segment": ({"pair_head": "sop", "causal": False}, "pair_head='sop' classifies two segments.*.now 0"),
    "outputs for all": ({"output_vocab_size": 97}, "output_vocab_size=97 must be below.*Try model.output_vocab_size=0"),
    "fewer outputs, tied": (
        {"output_vocab_size": 96},
        "output_vocab_size=96 gives.*fewer rows.*tie_embeddings=true.*tie_embeddings=false",
    ),
    "negative outputs": ({"output_vocab_size": -1}, "output_vocab_size=-1 must not be negative; 0 disables it"),
    "one bucket": ({"position": "t5", "relative_buckets": 1}, "relative_buckets=1 must be at least 2"),
    "near": ({"position": "t5", "relative_max_distance": 16}, "relative_max_distance=16 must exceed 16.*Try 128"),
    "dense layer": ({"dense_layers": (2,)}, r"dense_layers=\[2\] must list layers from 0 to 1"),
    "only dense layers": ({"dense_layers": (0, 1)}, r"dense_layers=\[0, 1\] leaves no layer.*Try model.num_experts=0"),
    "no width": ({"dense_layers": (0,), "ffn_size": 0}, "ffn_size=0 must be at least 1"),
    "plain experts": ({"activation": "relu"}, r"activation='relu' is not gated; experts need one of \['swiglu'"),
    "groups": ({"expert_groups": 3}, r"expert_groups=3 does not divide model.num_experts=4. Try one of \[1, 2, 4\]"),
    "too many groups": ({"expert_groups": 2, "groups_per_token": 3}, "groups_per_token=3 is more than .*Try 2"),
    "too many experts": ({"experts_per_token": 5}, "experts_per_token=5 must be between 1 and model.num_experts=4"),
    "out of reach": ({"expert_groups": 2, "experts_per_token": 3}, "experts_per_token=3"),
    "groups of one": ({"expert_groups": 4, "experts_per_token": 1, "selection_bias": True}, "expert_groups=2"),
    "no expert width": ({"expert_ffn_size": 0}, "expert_ffn_size=0 must be at least 1"),
    **{f"unknown {name}": ({name: "x"}, rf"model.{name}='x' is unknown. Try one of \['") for name in CHOICES},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_rule_says_the_value_the_rule_and_what_would_fit(name):
    values, said = REFUSED[name]
    with pytest.raises(ConfigError, match=f"(?s){said}") as refused:
        tiny_config(**values)
    assert len(str(refused.value)) < 500  # one screen


def test_unknown_keys_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"unknown model keys \['hidden'\]; known: "):
        ModelConfig.from_dict({"hidden": 3})
    with pytest.raises(ConfigError, match=r"unknown model.rope keys \['base'\]"):
        ModelConfig.from_dict({"rope": {"base": 3}})


def same_after_json(config: ModelConfig) -> bool:
    return ModelConfig.from_dict(json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize("name", PRESETS)
def test_presets_keep_every_rule_and_survive_json(name):
    assert same_after_json(PRESETS[name])
    assert PRESETS[name].differences(PRESETS[name]) == {}


def test_configs_differ_in_what_their_models_read():
    plain = tiny_config()
    assert tiny_config(ffn_size=50).differences(plain) == {}  # no layer is dense
    mixed = tiny_config(dense_layers=(0,))
    assert tiny_config(dense_layers=(0,), ffn_size=50).differences(mixed) == {"ffn_size": (50, 48)}
    assert set(mixed.differences(plain)) == {"dense_layers"}
    rope = Rope(theta=1e6)
    assert tiny_config(rope=rope).differences(plain) == {"rope": (rope, plain.rope)}
    assert tiny_config(init_std=0.5, embedding_std=1.0, max_positions=7).differences(plain) == {}


# What is accepted works

LENGTH = {"factor": 2.0, "original_max_positions": 8}


def ropes():
    """Every kind, for heads of 8 channels of which half or all turn."""

    def build(kind: str, partial: float, interleaved: bool) -> Rope:
        more = {} if kind == "default" else LENGTH
        if kind == "longrope":
            divisors = (1.0, 2.0, 3.0, 4.0)[: int(4 * partial)]
            more = {**LENGTH, "short_factor": divisors, "long_factor": divisors[::-1]}
        return Rope(kind=kind, partial=partial, interleaved=interleaved, **more)

    return st.builds(build, st.sampled_from(ROPE_KINDS), st.sampled_from([1.0, 0.5]), st.booleans())


TUPLES_OF_LAYERS = [("full",), ("window",), ("full", "window"), ("linear",), ("sparse", "full"), ("linear", "full")]
TUPLES_OF_LAYERS += [("gated_delta", "full"), ("kda",), ("global",), ("window", "global"), ("mamba2", "full")]

SIZES = {"vocab_size": 13, "num_layers": 2, "head_dim": 8, "ffn_size": 6, "max_positions": 16, "init_std": 0.3}

ANY_VALUES = {
    "hidden_size": st.sampled_from([6, 7]),
    "encoder_layers": st.sampled_from([0, 0, 3]),
    "mtp_layers": st.sampled_from([0, 1, 2]),
    "causal": st.booleans(),
    "shared_layers": st.booleans(),
    "segments": st.sampled_from([0, 2]),
    "embedding_norm": st.booleans(),
    "head": st.sampled_from([(0, False), (0, True), (4, True)]),
    "pairs": st.sampled_from([("none", 2), ("nsp", 2), ("sop", 3)]),
    "head_bias": st.booleans(),
    "position_offset": st.sampled_from([0, 2]),
    "heads": st.sampled_from([(4, 4), (4, 2), (3, 1), (1, 1), (4, 3)]),
    "qkv_bias": st.booleans(),
    "o_bias": st.booleans(),
    "qk_norm": st.sampled_from(CHOICES["qk_norm"]),
    "attention_scale": st.sampled_from([0.0, 0.7]),
    "attention_softcap": st.sampled_from([0.0, 0.0, 2.0]),
    "sinks": st.booleans(),
    "layers": st.sampled_from(TUPLES_OF_LAYERS),
    "attention_gate": st.booleans(),
    "delta_heads": st.sampled_from([(0, 0), (2, 4), (1, 1), (3, 4)]),
    "delta_sizes": st.sampled_from([(0, 0), (3, 0), (4, 5)]),
    "delta_conv": st.sampled_from([1, 2, 4]),
    "delta_negative": st.booleans(),
    "delta_norm_eps": st.sampled_from([0.0, 1e-3]),
    "global_heads": st.sampled_from([(0, 0), (8, 1), (6, 2)]),
    "global_shared_values": st.booleans(),
    "v_norm": st.booleans(),
    "layer_scalars": st.booleans(),
    "latent": st.sampled_from([(0, 0, 0, 0), (5, 4, 0, 0), (5, 2, 3, 4), (5, 6, 7, 9), (0, 4, 0, 0)]),
    "position": st.sampled_from(CHOICES["position"]),
    "rope": ropes(),
    "rope_layers": st.sampled_from([(True,), (False, True)]),
    "local_rope_theta": st.sampled_from([0.0, 100.0]),
    "relative": st.sampled_from([(32, 128), (6, 9), (2, 2)]),
    "norm": st.sampled_from(CHOICES["norm"]),
    "norm_order": st.sampled_from(CHOICES["norm_order"]),
    "norm_offset": st.booleans(),
    "activation": st.sampled_from(CHOICES["activation"]),
    "ffn_bias": st.booleans(),
    "experts": st.sampled_from([(0, 1, 1, 1), (4, 2, 1, 1), (4, 2, 2, 1), (6, 3, 3, 2), (3, 3, 1, 1), (4, 1, 4, 2)]),
    "expert_ffn_size": st.sampled_from([5, 8]),
    "expert_bias": st.booleans(),
    "shared": st.sampled_from([(0, True), (5, True), (5, False)]),
    "dense_layers": st.sampled_from([(), (0,), (1,), (0, 1)]),
    "score_function": st.sampled_from(CHOICES["score_function"]),
    "router_bias": st.booleans(),
    "selection_bias": st.booleans(),
    "normalize_gates": st.booleans(),
    "routed_scale": st.sampled_from([1.0, 2.5]),
    "balance_scope": st.sampled_from(CHOICES["balance_scope"]),
    "router_z_loss_weight": st.sampled_from([0.0, 0.01]),
    "selection_bias_rate": st.sampled_from([0.0, 0.01]),
    "router_jitter": st.sampled_from([0.0, 0.1]),
    "capacity_factor": st.sampled_from([0.0, 1.0, 1.5]),
    "outputs": st.sampled_from([(True, 0), (False, 0), (False, 9)]),
    "embedding_scale": st.sampled_from([1.0, 2.0]),
    "residual_scale": st.sampled_from([1.0, 0.5]),
    "logit_scale": st.sampled_from([1.0, 0.5]),
    "logit_softcap": st.sampled_from([0.0, 3.0]),
    "residual_dropout": st.sampled_from([0.0, 0.2]),
    "embedding_std": st.sampled_from([0.0, 0.4]),
}
"""Fields and what is tried for them; those that are not drawn stay at their defaults."""

TOGETHER = {
    "heads": ("num_heads", "num_kv_heads"),
    "head": ("embedding_size", "head_transform"),
    "pairs": ("pair_head", "segments"),
    "outputs": ("tie_embeddings", "output_vocab_size"),
    "latent": ("kv_lora_rank", "rope_head_dim", "q_lora_rank", "value_head_dim"),
    "relative": ("relative_buckets", "relative_max_distance"),
    "delta_heads": ("delta_key_heads", "delta_value_heads"),
    "global_heads": ("global_head_dim", "global_kv_heads"),
    "delta_sizes": ("delta_key_dim", "delta_value_dim"),
    "experts": ("num_experts", "experts_per_token", "expert_groups", "groups_per_token"),
    "shared": ("shared_ffn_size", "shared_gate"),
}


def spelled_out(drawn: dict) -> dict:
    """The fields of a draw; what must go together goes, so that most draws are accepted."""
    values = {**SIZES, "hidden_size": 6, "num_heads": 4, "num_kv_heads": 2}
    for name, value in drawn.items():
        values |= dict(zip(TOGETHER[name], value, strict=True)) if name in TOGETHER else {name: value}
    if values.get("encoder_layers"):
        alone = {"causal", "shared_layers", *TOGETHER["latent"], *TOGETHER["experts"]}
        values = {name: value for name, value in values.items() if name not in alone and value != "sandwich"}
    layers = values.get("layers", ("full",))
    values |= {"window": 3} if {"window", "sparse"} & set(layers) else {}
    values |= {"sparse_stride": 4} if "sparse" in layers else {}
    values |= {"num_kv_heads": values["num_heads"]} if values.get("kv_lora_rank") else {}
    values |= {"selection_bias": True} if values.get("selection_bias_rate") else {}
    useless = set() if values.get("num_experts") else {"dense_layers"}
    useless |= set() if values.get("position", "rope") == "rope" else {"rope", "rope_layers", "local_rope_theta"}
    useless |= set() if values.get("position") == "learned" else {"position_offset"}
    useless |= set() if "window" in layers else {"local_rope_theta"}
    useless |= {"attention_scale", "attention_softcap", "sinks"} if "linear" in layers else set()
    if not {"gated_delta", "kda", "mamba2"} & set(layers):
        useless |= {name for name in values if name.startswith("delta_")}
    useless |= {"delta_negative"} if "mamba2" in layers else set()
    if "global" not in layers:
        useless |= {name for name in values if name.startswith("global_")}
    useless |= set() if set(layers) - {"gated_delta", "kda"} else {"attention_gate", "v_norm"}
    if not set(layers) - {"gated_delta", "kda"} and not values.get("encoder_layers"):
        useless |= {"attention_softcap", "sinks", "qk_norm"}
    useless |= {"v_norm"} if values.get("kv_lora_rank") or values.get("encoder_layers") else set()
    useless |= {"norm_offset"} if values.get("norm") == "layernorm" else set()
    return {name: value for name, value in values.items() if name not in useless}


@st.composite
def draws(draw) -> dict:
    """Values of up to 12 fields."""
    names = draw(st.lists(st.sampled_from(sorted(ANY_VALUES)), max_size=12, unique=True))
    return {name: draw(ANY_VALUES[name]) for name in names}


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(draws())
def test_a_config_is_refused_or_runs(drawn):
    config = accepted(drawn)
    if config is not None:
        assert same_after_json(config)
        check_runs(config)


def accepted(drawn: dict) -> ModelConfig | None:
    """The config, None where a rule refuses it."""
    try:
        return ModelConfig(**spelled_out(drawn))
    except ConfigError:
        return None


def check_runs(config: ModelConfig) -> None:
    """Loss and every gradient of a packed batch are finite and there; parameters are as many as arithmetic says."""
    model = CausalLM(Decoder(config))
    assert sum(count_parameters(config).values()) == sum(p.numel() for p in model.parameters())
    batch = ahead(packed_batch([[5, 1, 6], [9, 3]], vocab_size=config.head_rows))
    if config.encoder_layers:
        batch = pair_batch(((5, 4), (1, 7), (6, 2)), vocab=config.head_rows)
    loss = model.loss_sum(model(batch, TrainingPass(seed=1)))
    step_loss(loss, 0.5, config.router_z_loss_weight).backward()
    assert loss["nll"].isfinite()
    assert 0.2 < loss["nll"].item() / batch.num_targets / math.log(config.head_rows) < 5
    if model.network.pair_head is not None:
        for p in model.network.pair_head.parameters():  # the causal objective does not read it
            p.grad = p.new_zeros(p.shape)
    assert all(grad.isfinite().all() for grad in gradients(model).values())
    assert sum(grad.any().item() for grad in gradients(model).values())


def test_most_draws_are_accepted():
    """Or the property above would show nothing."""
    counts = []
    settings(max_examples=60, deadline=None, database=None)(
        given(draws())(lambda drawn: counts.append(accepted(drawn) is not None))
    )()
    assert sum(counts) > 0.5 * len(counts)


def test_every_field_is_drawn_or_of_no_consequence():
    drawn = {f for name in ANY_VALUES for f in TOGETHER.get(name, (name,))}
    # A model of images has rules of its own (``test_image_rules``).
    of_images = {"image", "classes", "class_pool", "class_bias", "token_head"}
    others = {
        *SIZES,
        *of_images,
        "adapter",
        "num_experts",
        "window",
        "sparse_stride",
        "balance_loss_weight",
        "norm_eps",
    }
    assert {f.name for f in fields(ModelConfig)} == drawn | others


def test_every_field_has_one_role():
    roles = [names_of_role(role) for role in get_args(Role)]
    assert sorted(name for names in roles for name in names) == sorted(f.name for f in fields(ModelConfig))
    assert all(roles)

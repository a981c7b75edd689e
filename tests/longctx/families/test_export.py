"""Exports: which type a config is written as, and that no option of training stands in the way of any."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.architecture.fields import names_of_role
from longctx.architecture.rope import Rope
from longctx.config import PRESETS, ModelConfig
from longctx.conversion import export_checkpoint, load_hf
from longctx.conversion.checkpoint_writer import save_master_weights
from longctx.families import canonical_fields, config_to_hf, dropped_training_fields, family_of
from tests.longctx.families import hf_models
from tests.longctx.families.hf_models import CASES, ENCODERS, TWO_STACKS, VISION, WITH_CLASS
from tests.longctx.families.hub_configs import HUB
from tests.longctx.samples import dense_config, tiny_config

PLAIN = {"qkv_bias": False}
YARN = Rope(kind="yarn", factor=4.0, original_max_positions=64)


@cache
def imported(name: str) -> tuple[str, ModelConfig]:
    """Type and config of a published model, or of one of the tests' own."""
    hf = HUB.get(name) or (CASES | ENCODERS | TWO_STACKS | VISION)[name].config_json()
    return hf["model_type"], ModelConfig.from_hf(hf)


IMPORTED = (*HUB, *CASES, *ENCODERS, *TWO_STACKS, *VISION)
"""Every config.json that the tests know."""


class TestType:
    @pytest.mark.parametrize(
        ("config", "model_type"),
        [
            (dense_config(**PLAIN), "llama"),
            (dense_config(**PLAIN, tie_embeddings=False, rope=YARN), "llama"),
            (dense_config(**PLAIN, ffn_bias=True), "llama"),
            (dense_config(qkv_bias=True, o_bias=True), "llama"),
            (dense_config(**PLAIN, activation="geglu_tanh"), "llama"),
            (dense_config(**PLAIN, layers=("window",), window=8), "mistral"),
            (dense_config(), "qwen2"),
            (dense_config(layers=("full", "window"), window=8), "qwen2"),
            (dense_config(**PLAIN, qk_norm="head"), "qwen3"),
            (dense_config(ffn_bias=True), "seed_oss"),
            (tiny_config(), "qwen2_moe"),
            (tiny_config(**PLAIN), "qwen2_moe"),
            (tiny_config(**PLAIN, shared_ffn_size=0), "mixtral"),
            (tiny_config(**PLAIN, shared_ffn_size=0, qk_norm="head"), "qwen3_moe"),
            (PRESETS["llama-3.1-8b"], "llama"),
            (PRESETS["deepseek-v3"], "deepseek_v3"),
            (PRESETS["gpt-3"], "gpt2"),
            (PRESETS["bart-base"], "bart"),
            (PRESETS["opus-mt"], "marian"),
            (PRESETS["t5-v1.1-base"], "t5"),
        ],
    )
    def test_a_model_of_ours_is_the_most_common_type_that_fits(self, config, model_type):
        assert family_of(config).model_type == model_type

    @pytest.mark.parametrize("name", IMPORTED)
    def test_an_imported_model_keeps_its_type(self, name):
        model_type, config = imported(name)
        assert config_to_hf(config, model_type=model_type)["model_type"] == model_type

    def test_only_these_types_fall_to_another_one_when_nothing_says_which(self):
        """What a model that was trained from scratch with a family's shape is exported as."""
        others = {
            (model_type, family_of(config).model_type)
            for model_type, config in map(imported, IMPORTED)
            if family_of(config).model_type != model_type
        }
        # Mistral without a window is Llama, and so is Ministral 3 whose queries do not grow, Seed-OSS with both biases
        # too, Phi-3 with a window is Mistral, and Qwen3.5 with experts in all layers is Qwen3-Next.
        named = {("mistral", "llama"), ("seed_oss", "llama"), ("phi3", "mistral"), ("ministral3", "llama")}
        assert others == named | {("qwen3_5_moe_text", "qwen3_next")}

    def test_a_hybrid_that_leaves_its_sizes_out_is_qwens(self):
        """Heads of gated delta layers that are not named are attention's."""
        values = {"layers": ("gated_delta", "full"), "attention_gate": True, "qk_norm": "head", "norm_offset": True}
        rope = Rope(partial=0.25)
        config = ModelConfig(**values, num_heads=4, num_kv_heads=2, head_dim=16, qkv_bias=False, rope=rope)
        assert family_of(config).model_type == "qwen3_5_text"

    def test_every_family_is_among_the_imported_ones(self):
        assert {model_type for model_type, _ in map(imported, IMPORTED)} == set(WITH_CLASS)


NUMBERS = {
    "balance_loss_weight": st.floats(0, 10),
    "router_z_loss_weight": st.floats(0, 10),
    "selection_bias_rate": st.floats(0, 1),
    "router_jitter": st.floats(0, 0.99),
    "capacity_factor": st.sampled_from([0.0, 1.0, 1.25, 64.0]),
    "residual_dropout": st.floats(0, 0.99),
    "init_std": st.floats(1e-6, 10),
    "embedding_std": st.floats(0, 10),
}
TRAINING = {**NUMBERS, "balance_scope": st.sampled_from(["sequence", "micro_batch", "global_batch"])}
"""Values of each field that training alone reads."""


@st.composite
def trained_configs(draw) -> tuple[str, ModelConfig, ModelConfig]:
    """A type, a config that was imported as it, and the same after training with any options."""
    model_type, config = imported(draw(st.sampled_from(IMPORTED)))
    options = {name: draw(values) for name, values in TRAINING.items()}
    # The only options that ``ModelConfig`` allows some models alone.
    if not config.selection_bias:
        options["selection_bias_rate"] = 0.0
    if config.image.depths:
        options["residual_dropout"] = 0.0
    return model_type, config, dataclasses.replace(config, **options)


class TestTrainingOptions:
    def test_all_of_them_are_drawn(self):
        assert TRAINING.keys() == names_of_role("training")

    @settings(max_examples=40, deadline=None)
    @given(trained_configs())
    def test_none_stops_an_export_or_changes_its_type_or_function(self, drawn):
        model_type, before, after = drawn
        hf = json.loads(json.dumps(config_to_hf(after, model_type=model_type)))
        assert hf["model_type"] == model_type
        assert family_of(after).model_type == family_of(before).model_type
        back = ModelConfig.from_hf(hf)
        assert canonical_fields(back) == canonical_fields(after) == canonical_fields(before)
        # What config.json has no key for is named, with the value that it had.
        named = dropped_training_fields(after, hf)
        assert "embedding_std" not in named, "weights that are there do not begin again"
        for name in TRAINING.keys() - {"embedding_std"}:
            value = getattr(after, name)
            assert value in (getattr(back, name), getattr(ModelConfig(), name)) or named[name] == value

    @settings(max_examples=40, deadline=None)
    @given(trained_configs(), st.sampled_from(["default", "linear", "yarn", "llama3", "ntk"]), st.integers(1, 8))
    def test_nor_does_a_stretch_of_positions(self, drawn, kind, factor):
        """What a run that starts from a checkpoint may change besides."""
        model_type, _, config = drawn
        if config.position != "rope":
            return
        kept = {"theta": 2e6, "interleaved": config.rope.interleaved, "partial": config.rope.partial}
        if kind != "default":
            kept |= {"factor": float(factor), "original_max_positions": 64}
        if kind in ("linear", "ntk"):
            del kept["original_max_positions"]
        # Gemma 4's global layers have one way to be stretched.
        if model_type == "gemma4_text":
            kind, kept = "proportional", {"theta": 2e6, "partial": config.rope.partial, "factor": float(factor)}
        stretched = dataclasses.replace(config, rope=Rope(kind=kind, **kept), max_positions=64 * factor)
        if stretched.window:
            stretched = dataclasses.replace(stretched, window=stretched.window + 1)
        hf = json.loads(json.dumps(config_to_hf(stretched, model_type=model_type)))
        assert hf["model_type"] == model_type
        assert canonical_fields(ModelConfig.from_hf(hf)) == canonical_fields(stretched)


OPTIONS = {
    "balance_loss_weight": 0.3, "balance_scope": "global_batch", "router_z_loss_weight": 0.2, "router_jitter": 0.3,
    "capacity_factor": 1.0, "residual_dropout": 0.4, "init_std": 0.5, "embedding_std": 1.5,
}  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize("model_type", WITH_CLASS)
def test_a_miniature_trained_with_every_option_says_the_same_in_transformers(model_type, tmp_path):
    """The whole export of a checkpoint, whose logits are compared with those of transformers."""
    folder = hf_models.save(hf_models.build((CASES | ENCODERS | TWO_STACKS | VISION)[model_type]), tmp_path / "theirs")
    config, tensors = load_hf(folder)
    options = OPTIONS
    if config.image.depths:
        options = options | {"residual_dropout": 0.0}
    trained = dataclasses.replace(config, **options)
    if config.selection_bias:
        trained = dataclasses.replace(trained, selection_bias_rate=0.1)
    ours = tmp_path / "ours"
    save_master_weights(trained, tensors.items(), ours, dtype=torch.float32, training={"model_type": model_type})
    done = export_checkpoint(ours, tmp_path / "again", verify="logits")
    assert done.logits is not None
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == model_type

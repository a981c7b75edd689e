"""Parameter counts by arithmetic: those of the real module for any config, and those that are published."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from launcher.config.load_config import QUICKSTART, load_run_config
from longctx.architecture.adapter import AdapterShape
from longctx.architecture.size import COMPONENTS, count_matrices, count_parameters, widest_ffn
from longctx.config import PRESETS, ModelConfig
from longctx.model.decoder import Decoder
from tests.launcher.runs import recipe_flags
from tests.longctx.architecture.test_model_rules import accepted, draws
from tests.longctx.image_samples import PATCHES, WINDOWS, igpt_config, swin_config, vit_config
from tests.longctx.samples import dense_config, tiny_config

RECIPES = sorted(QUICKSTART.parent.glob("*.toml"))

PUBLISHED = {
    "gpt-1": 116_534_784,
    "gpt2-xl": 1_557_611_200,
    # 76 million, 455 million and 1.4 billion in the paper.
    "imagegpt-small": 76_682_240,
    "imagegpt-medium": 455_489_536,
    "imagegpt-large": 1_362_914_304,
    # 86, 307, 29 and 88 million in the papers.
    "vit-base-16": 86_567_656,
    "vit-large-16": 304_326_632,
    "swin-tiny": 28_288_354,
    "swin-base": 87_768_224,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3": 671_026_404_352,
}

WHERE = {
    "eh_proj": "mtp",
    "reduction": "merging",
    "embed_tokens": "embedding",
    "embed_patches": "embedding",
    "embed_segments": "embedding",
    "embed_projection": "embedding",
    "embed_positions": "positions",
    "self_attn.relative_bias": "attention",
    "relative": "positions",
    "norm": "norms",
    "self_attn": "attention",
    "cross_attn": "attention",
    "shared_expert": "shared_expert",
    "mlp.experts": "routed_experts",
    "mlp.gate.": "router",
    "mlp": "dense_ffn",
    "lm_head": "head",
    "pair_head": "head",
    "class_head": "head",
}
"""Part of a parameter's name -> its component; the first that is in the name counts."""


LOOKED_UP = ("embed_positions", "embed_segments", "relative_bias")
"""Tables beside that of the tokens."""

IMAGES = {
    "class token": vit_config(num_experts=0, shared_ffn_size=0),
    "means": vit_config(replace(PATCHES, class_token=False), class_pool="mean", max_positions=15, class_bias=False),
    "stages": swin_config(),
    "three stages, norms after": swin_config(
        replace(WINDOWS, height=24, depths=(1, 2, 1)), num_layers=4, norm_order="post", classes=0, class_pool="first"
    ),
    "windows in one stage": swin_config(replace(WINDOWS, depths=(5,))),
    "both heads": igpt_config(classes=5, class_pool="mean"),
    "classes of pixels": igpt_config(classes=5, class_pool="mean", token_head=False, output_vocab_size=0),
}


def on_meta(config: ModelConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(config, seed=None)


def counted(decoder: Decoder) -> Counter[str]:
    """Parameters of a real module by component."""
    found: Counter[str] = Counter()
    for name, parameter in decoder.named_parameters():
        found[next(component for part, component in WHERE.items() if part in name)] += parameter.numel()
    return found


def check_against_the_module(config: ModelConfig) -> None:
    decoder = on_meta(config)
    assert all(p.is_meta for p in decoder.parameters())
    counts = count_parameters(config)
    assert list(counts) == list(COMPONENTS)
    assert counts == {name: counted(decoder)[name] for name in COMPONENTS}
    names_2d = (".weight", "experts.gate_up_proj", "experts.down_proj")
    matrices = sum(
        p.numel()
        for name, p in decoder.named_parameters()
        if p.dim() > 1 and name.endswith(names_2d) and not any(part in name for part in (*LOOKED_UP, "conv1d"))
    )
    assert sum(count_matrices(config).values()) == matrices


@settings(max_examples=150, deadline=None)
@given(draws())
def test_the_count_is_the_modules_for_any_config(drawn):
    config = accepted(drawn)
    if config is not None:
        check_against_the_module(config)


@pytest.mark.parametrize("name", PRESETS)
def test_the_count_is_the_modules_for_every_preset(name):
    check_against_the_module(PRESETS[name])


@pytest.mark.parametrize("name", IMAGES)
def test_the_count_is_the_modules_for_images(name):
    check_against_the_module(IMAGES[name])


@pytest.mark.few(5)
@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_the_count_is_the_modules_for_every_recipe(path):
    config = load_run_config(recipe_flags(path)).model.config()
    # Adapters count separately.
    check_against_the_module(replace(config, adapter=AdapterShape()))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name):
    assert sum(count_parameters(PRESETS[name]).values()) == PUBLISHED[name]


def test_the_175_billion_of_gpt_3():
    config = PRESETS["gpt-3"]
    counts = count_matrices(config)
    assert 4 * config.hidden_size * config.head_dim == 6_291_456, "one head's query, key, value and output"
    assert counts["attention"] == 6_291_456 * config.num_heads * config.num_layers == 57_982_058_496
    assert counts["dense_ffn"] == 115_964_116_992
    assert counts["embedding"] == counts["head"] == 617_558_016
    assert sum(counts.values()) == 175_181_291_520


@pytest.mark.parametrize(
    ("name", "active"),
    [("mixtral-8x7b", 12_879_925_248), ("qwen3-30b-a3b", 3_353_032_704), ("deepseek-v3", 37_552_282_624)],
)
def test_parameters_that_one_token_visits(name, active):
    """12.9, 3.3 and 37 billion, as their authors round them."""
    config = PRESETS[name]
    assert sum(count_parameters(config, active=True).values()) == active


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (dense_config(expert_ffn_size=4096), 48),
        (tiny_config(ffn_size=4096), 2 * 16),
        (tiny_config(ffn_size=4096, dense_layers=(1,)), 4096),
        (tiny_config(shared_ffn_size=100), 100),
    ],
)
def test_the_widest_ffn_is_one_that_the_model_has(config, width):
    """A dense model's memory was counted with an expert's width, and the other way round."""
    assert widest_ffn(config) == width


def test_all_parameters_of_a_dense_model_are_active():
    config = dense_config()
    assert count_parameters(config, active=True) == count_parameters(config)
    assert count_matrices(config, active=True) == count_matrices(config)

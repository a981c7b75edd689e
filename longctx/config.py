"""``ModelConfig``: a decoder's full definition, and named models. Imports no tensor library."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

from longctx import families
from longctx.architecture.adapter import AdapterShape
from longctx.architecture.fields import ModelFields, names_of_role
from longctx.architecture.image import ImageShape
from longctx.architecture.model_rules import check_model
from longctx.architecture.rope import Rope
from longctx.errors import ConfigError
from longctx.untrusted.strict_json import shown

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelFields):
    """A checked decoder shape; ``longctx/architecture/fields.py`` documents the fields.

    For an optional number, 0 disables it (or selects the usual value). The defaults describe a small Qwen2: pre-norm
    RMSNorm, rotary positions, grouped-query attention, SwiGLU.
    """

    def __post_init__(self) -> None:
        check_model(self)

    def differences(self, other: ModelConfig) -> dict[str, tuple[Any, Any]]:
        """Return the fields that make the two configs different functions of their weights: name -> (this one's, the
        other's).

        Weight initialization, loss weights and sizes that a dense (or expert) model does not read make no difference.
        """
        idle = names_of_role("training") | names_of_role("length")
        # A model without experts ignores their fields, and one with only experts ignores the dense FFN width.
        if not self.num_experts:
            idle |= names_of_role("experts")
        elif not self.dense_layers:
            idle |= {"ffn_size"}
        mismatches: dict[str, tuple[Any, Any]] = {}
        for f in fields(ModelConfig):
            own_value, other_value = getattr(self, f.name), getattr(other, f.name)
            if own_value != other_value and f.name not in idle:
                mismatches[f.name] = own_value, other_value
        return mismatches

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build a config from plain values, with lists for tuples as in JSON; raise ConfigError for an unknown key."""
        values = dict(values)
        for name, kind in (("rope", Rope), ("image", ImageShape), ("adapter", AdapterShape)):
            if isinstance(values.get(name), dict):
                values[name] = _from_plain(kind, values[name], f"model.{name}")
        return _from_plain(cls, values, "model")

    @classmethod
    def from_hf(cls, config: dict[str, Any], *, mtp: bool = False) -> Self:
        """Convert a Hugging Face ``config.json``; raise ConfigError if this decoder cannot represent the model.

        With ``mtp``, include its multi-token prediction blocks.
        """
        return cls(**families.config_from_hf(config, mtp=mtp))

    def to_hf(self) -> dict[str, Any]:
        """Return a Hugging Face ``config.json`` for this model; raise ConfigError if no family has its shape."""
        return families.config_to_hf(self)


def _from_plain(kind: type[T], values: dict[str, Any], where: str) -> T:
    """Build a dataclass from plain values; raise ConfigError for an unknown key."""
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"unknown {where} keys {shown(unknown)}; known: {sorted(known)}.")
    # JSON and TOML have no tuples, and a frozen config must be hashable
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return kind(**(values | lists))


_QUICKSTART = {
    # In a model this young, routers cannot tell similar tokens apart and choose the same experts: large untied
    # embeddings separate the tokens, and jitter blurs the remaining similarity (docs/experts.md).
    "quickstart": ModelConfig(
        num_layers=2,
        num_experts=8,
        expert_ffn_size=128,
        shared_ffn_size=256,
        tie_embeddings=False,
        embedding_std=1.0,
        balance_loss_weight=0.3,
        router_jitter=0.3,
    ),
    "quickstart-dense": ModelConfig(num_layers=2),
}

_OPENAI: dict[str, Any] = {
    "o_bias": True,
    "position": "learned",
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "activation": "gelu_tanh",
    "ffn_bias": True,
}
"""Shared by OpenAI's models."""

_GPT = {
    "gpt-1": ModelConfig(  # Radford et al. 2018
        **_OPENAI,
        vocab_size=40_478,
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        max_positions=512,
        norm_order="post",
        ffn_size=3072,
        residual_dropout=0.1,
    ),
    "gpt2-xl": ModelConfig(  # Radford et al. 2019
        **_OPENAI,
        vocab_size=50_257,
        hidden_size=1600,
        num_layers=48,
        num_heads=25,
        num_kv_heads=25,
        max_positions=1024,
        ffn_size=6400,
        residual_dropout=0.1,
    ),
    # arXiv 2005.14165, table 2.1. There every other layer is banded with an unpublished width; here all are full. The
    # paper does not state whether the head is tied; the usual count of 175 billion has a separate one.
    "gpt-3": ModelConfig(
        **_OPENAI,
        vocab_size=50_257,
        hidden_size=12_288,
        num_layers=96,
        num_heads=96,
        num_kv_heads=96,
        head_dim=128,
        max_positions=2048,
        ffn_size=49_152,
        tie_embeddings=False,
    ),
}

_IMAGE_GPT: dict[str, Any] = _OPENAI | {
    "vocab_size": 513,
    "output_vocab_size": 512,
    "tie_embeddings": False,
    "norm": "rmsnorm",
    "activation": "quick_gelu",
    "max_positions": 1024,
    "residual_dropout": 0.1,
    "image": ImageShape(height=32, width=32),
}
"""Shared by Image GPT's models: 512 colors and a begin token, images of 32 × 32 pixels."""

# "Generative Pretraining from Pixels" (Chen et al., ICML 2020).
_IMAGE_GPTS = {
    "imagegpt-small": ModelConfig(
        **_IMAGE_GPT, hidden_size=512, num_layers=24, num_heads=8, num_kv_heads=8, head_dim=64, ffn_size=2048
    ),
    "imagegpt-medium": ModelConfig(
        **_IMAGE_GPT, hidden_size=1024, num_layers=36, num_heads=8, num_kv_heads=8, head_dim=128, ffn_size=4096
    ),
    "imagegpt-large": ModelConfig(
        **_IMAGE_GPT, hidden_size=1536, num_layers=48, num_heads=16, num_kv_heads=16, head_dim=96, ffn_size=6144
    ),
}

_LLAMA_7B: dict[str, Any] = {
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "head_dim": 128,
    "qkv_bias": False,
    "norm_eps": 1e-5,
    "tie_embeddings": False,
}
"""Shared by Llama 7B and models with its shape."""

_LLAMA = {
    "llama-2-7b": ModelConfig(  # arXiv 2307.09288
        **_LLAMA_7B, vocab_size=32_000, num_kv_heads=32, max_positions=4096, ffn_size=11_008
    ),
    "llama-3.1-8b": ModelConfig(  # arXiv 2407.21783
        **_LLAMA_7B,
        vocab_size=128_256,
        num_kv_heads=8,
        max_positions=131_072,
        rope=Rope(kind="llama3", theta=500_000.0, factor=8.0, original_max_positions=8192),
        ffn_size=14_336,
    ),
}

_EXPERTS = {
    "mixtral-8x7b": ModelConfig(  # arXiv 2401.04088
        **_LLAMA_7B,
        vocab_size=32_000,
        num_kv_heads=8,
        max_positions=32_768,
        rope=Rope(theta=1e6),
        num_experts=8,
        experts_per_token=2,
        expert_ffn_size=14_336,
        balance_loss_weight=0.02,
    ),
    "qwen3-30b-a3b": ModelConfig(  # arXiv 2505.09388
        vocab_size=151_936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        max_positions=40_960,
        qkv_bias=False,
        qk_norm="head",
        rope=Rope(theta=1e6),
        num_experts=128,
        experts_per_token=8,
        expert_ffn_size=768,
        tie_embeddings=False,
    ),
    "qwen3.5-9b": ModelConfig(  # the text model: three gated delta layers per full attention layer
        vocab_size=248_320,
        hidden_size=4096,
        num_layers=32,
        num_heads=16,
        num_kv_heads=4,
        head_dim=256,
        ffn_size=12_288,
        max_positions=262_144,
        layers=("gated_delta", "gated_delta", "gated_delta", "full"),
        delta_key_heads=16,
        delta_value_heads=32,
        delta_key_dim=128,
        delta_value_dim=128,
        attention_gate=True,
        qkv_bias=False,
        qk_norm="head",
        norm_offset=True,
        norm_eps=1e-6,
        rope=Rope(theta=1e7, partial=0.25),
        tie_embeddings=False,
    ),
    "deepseek-v3": ModelConfig(  # arXiv 2412.19437, without the layer that predicts a second token
        vocab_size=129_280,
        hidden_size=7168,
        num_layers=61,
        num_heads=128,
        num_kv_heads=128,
        head_dim=192,
        max_positions=163_840,
        qkv_bias=False,
        q_lora_rank=1536,
        kv_lora_rank=512,
        rope_head_dim=64,
        value_head_dim=128,
        rope=Rope(
            kind="yarn", factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0, interleaved=True
        ),
        ffn_size=18_432,
        num_experts=256,
        experts_per_token=8,
        expert_ffn_size=2048,
        shared_ffn_size=2048,
        shared_gate=False,
        dense_layers=(0, 1, 2),
        score_function="sigmoid",
        selection_bias=True,
        expert_groups=8,
        groups_per_token=4,
        routed_scale=2.5,
        balance_loss_weight=0.0001,
        tie_embeddings=False,
    ),
}

_BERT: dict[str, Any] = {
    "causal": False,
    "o_bias": True,
    "position": "learned",
    "norm": "layernorm",
    "norm_order": "post",
    "activation": "gelu",
    "ffn_bias": True,
    "embedding_norm": True,
    "head_transform": True,
    "head_bias": True,
    "residual_dropout": 0.1,
    "max_positions": 512,
}
"""Shared by BERT and models with its shape."""
_BASE: dict[str, Any] = {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "num_kv_heads": 12, "ffn_size": 3072}
_LARGE: dict[str, Any] = {"hidden_size": 1024, "num_layers": 24, "num_heads": 16, "num_kv_heads": 16, "ffn_size": 4096}
_BERT_ENDS: dict[str, Any] = {"vocab_size": 30_522, "segments": 2, "norm_eps": 1e-12}
_ROBERTA_ENDS: dict[str, Any] = {"vocab_size": 50_265, "segments": 1, "norm_eps": 1e-5, "position_offset": 2}
_ALBERT: dict[str, Any] = {
    **_BERT,
    "vocab_size": 30_000,
    "embedding_size": 128,
    "shared_layers": True,
    "segments": 2,
    "norm_eps": 1e-12,
    "activation": "gelu_tanh",
    "residual_dropout": 0.0,
}

_ENCODERS = {
    "bert-base": ModelConfig(**_BERT, **_BASE, **_BERT_ENDS),  # arXiv 1810.04805
    "bert-large": ModelConfig(**_BERT, **_LARGE, **_BERT_ENDS),
    "roberta-base": ModelConfig(**_BERT, **_BASE, **_ROBERTA_ENDS),  # arXiv 1907.11692
    "roberta-large": ModelConfig(**_BERT, **_LARGE, **_ROBERTA_ENDS),
    "albert-base": ModelConfig(**_ALBERT, **_BASE),  # arXiv 1909.11942, version 2
    "albert-xxlarge": ModelConfig(
        **_ALBERT, hidden_size=4096, num_layers=12, num_heads=64, num_kv_heads=64, ffn_size=16_384
    ),
}

_VISION: dict[str, Any] = {
    "vocab_size": 0,
    "causal": False,
    "o_bias": True,
    "norm": "layernorm",
    "activation": "gelu",
    "ffn_bias": True,
    "classes": 1000,
}
"""Shared by image classifiers, which read patches; classes are ImageNet's."""
_VIT: dict[str, Any] = _VISION | {
    "position": "learned",
    "norm_eps": 1e-12,
    "image": ImageShape(height=224, width=224, patch=16, class_token=True),
    "max_positions": 197,
}


def _swin(depths: tuple[int, ...], width: int) -> ModelConfig:
    """Build a Swin with heads of 32 channels for images of 224 × 224 pixels; ``width`` is the first stage's."""
    image = ImageShape(
        height=224,
        width=224,
        patch=4,
        window=7,
        depths=depths,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )
    return ModelConfig(
        **_VISION,
        hidden_size=width,
        num_layers=sum(depths),
        num_heads=width // 32,
        num_kv_heads=width // 32,
        head_dim=32,
        ffn_size=4 * width,
        layers=("image_window", "shifted_window"),
        position="none",
        norm_eps=1e-5,
        embedding_norm=True,
        class_pool="mean",
        image=image,
    )


_CLASSIFIERS = {
    "vit-base-16": ModelConfig(**_VIT, **_BASE),  # arXiv 2010.11929
    "vit-large-16": ModelConfig(**_VIT, **_LARGE),
    "swin-tiny": _swin((2, 2, 6, 2), 96),  # arXiv 2103.14030, with the normalization of its published weights
    "swin-base": _swin((2, 2, 18, 2), 128),
}

_AFTER_SUMS: dict[str, Any] = {
    "o_bias": True,
    "norm": "layernorm",
    "norm_order": "post",
    "norm_eps": 1e-5,
    "ffn_bias": True,
    "head_bias": True,
    "residual_dropout": 0.1,
}
"""Shared by BART and Marian."""
_BART: dict[str, Any] = _AFTER_SUMS | {
    "vocab_size": 50_265,
    "position": "learned",
    "position_offset": 2,
    "max_positions": 1024,
    "activation": "gelu",
    "embedding_norm": True,
}
_OPUS: dict[str, Any] = _AFTER_SUMS | {
    "vocab_size": 58_101,
    "position": "sinusoidal_halves",
    "max_positions": 512,
    "activation": "silu",
    "embedding_scale": 512**0.5,
}
_T5: dict[str, Any] = {
    "vocab_size": 32_128,
    "max_positions": 512,
    "qkv_bias": False,
    "attention_scale": 1.0,
    "position": "t5",
    "activation": "relu",
    "residual_dropout": 0.1,
}
_T5_1_1: dict[str, Any] = _T5 | {"activation": "geglu_tanh", "tie_embeddings": False}
_SMALL: dict[str, Any] = {"hidden_size": 512, "num_heads": 8, "num_kv_heads": 8, "ffn_size": 2048}


def _encoder_decoder(layers: int, shape: dict[str, Any], rest: dict[str, Any]) -> ModelConfig:
    """Build an encoder-decoder config with ``layers`` layers in each stack."""
    values: dict[str, Any] = shape | rest | {"num_layers": layers, "encoder_layers": layers}
    return ModelConfig(**values)


_ENCODER_DECODERS = {
    "bart-base": _encoder_decoder(6, _BASE, _BART),  # arXiv 1910.13461
    "bart-large": _encoder_decoder(12, _LARGE, _BART),
    # Helsinki-NLP's OPUS translation models, by Marian; the vocabulary is from opus-mt-en-de.
    "opus-mt": _encoder_decoder(6, _SMALL, _OPUS),
    "t5-small": _encoder_decoder(6, _SMALL, _T5 | {"logit_scale": 512**-0.5}),  # arXiv 1910.10683
    "t5-base": _encoder_decoder(12, _BASE, _T5 | {"logit_scale": 768**-0.5}),
    "t5-large": _encoder_decoder(24, _LARGE, _T5 | {"logit_scale": 1024**-0.5}),
    "t5-v1.1-base": _encoder_decoder(12, _BASE, _T5_1_1 | {"ffn_size": 2048}),
    "t5-v1.1-large": _encoder_decoder(24, _LARGE, _T5_1_1 | {"ffn_size": 2816}),
}

PRESETS: dict[str, ModelConfig] = (
    _QUICKSTART | _GPT | _IMAGE_GPTS | _LLAMA | _EXPERTS | _ENCODERS | _CLASSIFIERS | _ENCODER_DECODERS
)
"""Named shapes for ``model.preset``: small starting points and published models."""

"""Vision Transformer: patches after a class token, learned positions, LayerNorm before sublayers, both directions."""

from __future__ import annotations

from typing import Any

from longctx.architecture.fields import ModelFields
from longctx.architecture.image import ImageShape
from longctx.errors import ConfigError
from longctx.families.config_rules import (
    UNUSED,
    all_heads,
    constant,
    divided_head_dim,
    first_of,
    integer,
    only,
    same,
    translated,
    typed,
    unsupported_dropout,
)
from longctx.families.image_classes import classes_of, of_either_class
from longctx.families.llama import DENSE
from longctx.families.spec import BLOCK, ConfigRule, Family, HfConfig, TensorRule
from longctx.untrusted.strict_json import shown

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}


def height_and_width(hf: HfConfig, key: str, default: int) -> tuple[int, int]:
    """Return a key's height and width; one number stands for both."""
    value = first_of(hf, (key,), default)
    sides = value if isinstance(value, list) else [value, value]
    if len(sides) != 2:
        raise ConfigError(f"{key}={shown(value)} in config.json must be one number, or height and width.")
    height, width = (typed(key, side, "int") for side in sides)
    return height, width


def written_size(image: ImageShape) -> Any:
    """Return an image's height and width as a key's value: one number for a square."""
    if image.height == image.width:
        return image.height
    return [image.height, image.width]


def square_patch(hf: HfConfig, default: int) -> int:
    """Return the patch side; raise ConfigError for patches that are not square."""
    height, width = height_and_width(hf, "patch_size", default)
    if height != width:
        raise ConfigError(f"patch_size={shown(hf['patch_size'])} in config.json is not supported; supported: squares.")
    return height


def _images() -> ConfigRule:
    """Return the rule for the images' shape, from which the number of positions follows."""

    def read(hf: HfConfig) -> dict[str, Any]:
        height, width = height_and_width(hf, "image_size", 224)
        image = ImageShape(
            height=height,
            width=width,
            patch=square_patch(hf, 16),
            channels=integer(hf, "num_channels", 3),
            class_token=True,
        )
        return {"image": image, "max_positions": image.num_tokens}

    def write(config: ModelFields) -> dict[str, Any]:
        image = config.image
        return {"image_size": written_size(image), "patch_size": image.patch, "num_channels": image.channels}

    return ConfigRule(keys=("image_size", "patch_size", "num_channels"), read=read, write=write)


def _tensors() -> tuple[TensorRule, ...]:
    # transformers 5 renames tensors when it loads a file; files have the names of transformers 4.
    block, attention = "vit.encoder.layer.{layer}", "vit.encoder.layer.{layer}.attention"
    pairs = {
        f"{BLOCK}self_attn.q_proj": f"{attention}.attention.query",
        f"{BLOCK}self_attn.k_proj": f"{attention}.attention.key",
        f"{BLOCK}self_attn.v_proj": f"{attention}.attention.value",
        f"{BLOCK}self_attn.o_proj": f"{attention}.output.dense",
        f"{BLOCK}mlp.up_proj": f"{block}.intermediate.dense",
        f"{BLOCK}mlp.down_proj": f"{block}.output.dense",
        f"{BLOCK}input_layernorm": f"{block}.layernorm_before",
        f"{BLOCK}post_attention_layernorm": f"{block}.layernorm_after",
        "model.embed_patches": "vit.embeddings.patch_embeddings.projection",
        "model.norm": "vit.layernorm",
        "class_head.out": "classifier",
    }
    rules = [
        rule
        for ours, name in pairs.items()
        for part in ("weight", "bias")
        for rule in of_either_class(f"{ours}.{part}", "vit.", f"{name}.{part}")
    ]
    # Both have further axes of size 1 on disk.
    rules += of_either_class("model.embed_patches.class_token", "vit.", "vit.embeddings.cls_token", axes=2)
    rules += of_either_class("model.embed_positions.weight", "vit.", "vit.embeddings.position_embeddings", axes=1)
    return tuple(rules)


VIT = Family(
    model_type="vit",
    architecture="ViTModel",
    other_architectures=("ViTForImageClassification",),
    rules=(
        *UNUSED,
        DENSE,
        constant(causal=False, vocab_size=0, position="learned", norm="layernorm", o_bias=True, ffn_bias=True),
        same("hidden_size", "hidden_size"),
        same("num_hidden_layers", "num_layers"),
        same("num_attention_heads", "num_heads"),
        same("intermediate_size", "ffn_size"),
        same("layer_norm_eps", "norm_eps", default=1e-12),
        same("initializer_range", "init_std", default=0.02),
        same("qkv_bias", "qkv_bias", default=True),
        translated("hidden_act", "activation", ACTIVATIONS, default="gelu"),
        divided_head_dim(),
        all_heads(),
        _images(),
        classes_of("ViTForImageClassification"),
        # transformers 5 derives the mask's direction from it.
        only("is_causal", None, False, written=False),
        unsupported_dropout("attention_probs_dropout_prob", 0.0),
        same("hidden_dropout_prob", "residual_dropout", default=0.0),
    ),
    tensors=_tensors(),
    # The pooler and the masked-image decoder are heads for other tasks.
    ignored_keys=frozenset({"encoder_stride", "pooler_output_size", "pooler_act"}),
    other_heads=(r"(vit\.)?pooler\.dense\.(weight|bias)", r"classifier\.(weight|bias)"),
    auto_class="AutoModel",
    classifier="ViTForImageClassification",
    image_processor="ViTImageProcessor",
)

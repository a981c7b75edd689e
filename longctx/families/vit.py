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
    same,
    translated,
    typed,
    unsupported_dropout,
)
from longctx.families.llama import DENSE
from longctx.families.spec import BLOCK, ConfigRule, Family, HfConfig, StorageLayout, TensorRule
from longctx.untrusted.strict_json import shown

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}


def two_sides(hf: HfConfig, key: str, default: int) -> tuple[int, int]:
    """Return a key's height and width; one number stands for both."""
    value = first_of(hf, (key,), default)
    sides = value if isinstance(value, list) else [value, value]
    if len(sides) != 2:
        raise ConfigError(f"{key}={shown(value)} in config.json must be one number, or height and width.")
    height, width = (typed(key, side, "int") for side in sides)
    return height, width


def square_patch(hf: HfConfig, default: int) -> int:
    """Return the patch side; raise ConfigError for patches that are not square."""
    height, width = two_sides(hf, "patch_size", default)
    if height != width:
        raise ConfigError(f"patch_size={shown(hf['patch_size'])} in config.json is not supported; supported: squares.")
    return height


def classes_of(architecture: str) -> ConfigRule:
    """Return the rule for the class head, which is recognized by the class that saved the folder."""

    def read(hf: HfConfig) -> dict[str, Any]:
        if hf.get("architectures") != [architecture]:
            return {"classes": 0}
        # transformers' default, for a config.json that leaves the names out.
        names = hf.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})
        if not isinstance(names, dict) or not names:
            raise ConfigError(f"id2label={shown(names)} in config.json must be a table with a name per class.")
        return {"classes": len(names)}

    def write(config: ModelFields) -> dict[str, Any]:
        if not config.classes:
            return {}
        labels = {str(number): f"LABEL_{number}" for number in range(config.classes)}
        return {
            "architectures": [architecture],
            "id2label": labels,
            "label2id": {label: int(number) for number, label in labels.items()},
        }

    return ConfigRule(keys=("id2label", "label2id"), read=read, write=write)


def _images() -> ConfigRule:
    """Return the rule for the images' shape, from which the number of positions follows."""

    def read(hf: HfConfig) -> dict[str, Any]:
        height, width = two_sides(hf, "image_size", 224)
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
        size: Any = [image.height, image.width]
        if image.height == image.width:
            size = image.height
        return {"image_size": size, "patch_size": image.patch, "num_channels": image.channels}

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
        _of_either_class(f"{ours}.{part}", f"{name}.{part}")
        for ours, name in pairs.items()
        for part in ("weight", "bias")
    ]
    # Both have further axes of size 1 on disk.
    rules.append(_of_either_class("model.embed_patches.class_token", "vit.embeddings.cls_token", axes=2))
    rules.append(_of_either_class("model.embed_positions.weight", "vit.embeddings.position_embeddings", axes=1))
    return tuple(rules)


def _of_either_class(ours: str, hf_name: str, *, axes: int = 0) -> TensorRule:
    """Return the rule for a tensor with ``axes`` leading axes of size 1 on disk, as a model with a head or without
    one saves it.
    """
    names = (hf_name, hf_name.removeprefix("vit."))
    return TensorRule(
        parameters=(ours,), layouts=tuple(StorageLayout(names=(name,), steps=("one_row",) * axes) for name in names)
    )


VIT = Family(
    model_type="vit",
    architecture="ViTModel",
    other_architectures=("ViTForImageClassification",),
    rules=(
        *UNUSED,
        DENSE,
        constant(causal=False, vocab_size=0, position="learned", norm="layernorm", o_bias=True, ffn_bias=True),
        same("hidden_size", "hidden_size", default=768),
        same("num_hidden_layers", "num_layers", default=12),
        same("num_attention_heads", "num_heads", default=12),
        same("intermediate_size", "ffn_size", default=3072),
        same("layer_norm_eps", "norm_eps", default=1e-12),
        same("initializer_range", "init_std", default=0.02),
        same("qkv_bias", "qkv_bias", default=True),
        translated("hidden_act", "activation", ACTIVATIONS, default="gelu"),
        divided_head_dim(),
        all_heads(),
        _images(),
        classes_of("ViTForImageClassification"),
        unsupported_dropout("attention_probs_dropout_prob", 0.0),
        same("hidden_dropout_prob", "residual_dropout", default=0.0),
    ),
    tensors=_tensors(),
    # The pooler and the masked-image decoder are heads for other tasks.
    ignored_keys=frozenset({"encoder_stride", "pooler_output_size", "pooler_act"}),
    other_heads=(r"(vit\.)?pooler\.dense\.(weight|bias)", r"classifier\.(weight|bias)"),
    auto_class="AutoModelForImageClassification",
)

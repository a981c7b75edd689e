"""Swin: windows of patches, shifted in every other layer, with patches merged between stages."""

from __future__ import annotations

from typing import Any

from longctx.architecture.fields import ModelFields
from longctx.architecture.image import ImageShape
from longctx.errors import ConfigError
from longctx.families.config_rules import (
    UNUSED,
    constant,
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
from longctx.families.spec import ConfigRule, Family, HfConfig, TensorRule
from longctx.families.vit import ACTIVATIONS, height_and_width, square_patch, written_size
from longctx.untrusted.strict_json import shown

_MOST_STAGES = 8


def _numbers(hf: HfConfig, key: str) -> list[int]:
    """Return a list with a positive number per stage."""
    values = first_of(hf, (key,))
    if not isinstance(values, list) or not 1 <= len(values) <= _MOST_STAGES:
        raise ConfigError(f"{key}={shown(values)} in config.json must list 1 to {_MOST_STAGES} numbers.")
    return [typed(key, value, "int") for value in values]


def _stages() -> ConfigRule:
    """Return the rule for the stages: their layers, widths and heads, which double from one to the next."""

    def read(hf: HfConfig) -> dict[str, Any]:
        depths, heads, width = _numbers(hf, "depths"), _numbers(hf, "num_heads"), integer(hf, "embed_dim")
        if heads != [heads[0] * 2**stage for stage in range(len(depths))] or heads[0] < 1:
            raise ConfigError(
                f"num_heads={shown(heads)} in config.json is not supported here; supported: one number per stage of "
                f"depths={shown(depths)}, each twice the one before."
            )
        last = width * 2 ** (len(depths) - 1)
        if hf.get("hidden_size", last) != last or hf.get("num_layers", len(depths)) != len(depths):
            raise ConfigError(
                f"hidden_size={shown(hf.get('hidden_size'))} and num_layers={shown(hf.get('num_layers'))} in "
                f"config.json contradict embed_dim={width} and depths={shown(depths)}."
            )
        ratio = typed("mlp_ratio", hf.get("mlp_ratio", 4.0), "float")
        height, columns = height_and_width(hf, "image_size", 224)
        image = ImageShape(
            height=height,
            width=columns,
            patch=square_patch(hf, 4),
            channels=integer(hf, "num_channels", 3),
            window=integer(hf, "window_size", 7),
            depths=tuple(depths),
        )
        return {
            "image": image,
            "num_layers": sum(depths),
            "hidden_size": width,
            "num_heads": heads[0],
            "num_kv_heads": heads[0],
            "head_dim": width // heads[0],
            "ffn_size": int(ratio * width),
        }

    def write(config: ModelFields) -> dict[str, Any]:
        image = config.image
        stages = range(len(image.depths))
        return {
            "embed_dim": config.hidden_size,
            "hidden_size": config.hidden_size * 2 ** (len(stages) - 1) if stages else config.hidden_size,
            "depths": list(image.depths),
            "num_layers": len(stages),
            "num_heads": [config.num_heads * 2**stage for stage in stages],
            "mlp_ratio": config.ffn_size / config.hidden_size,
            "image_size": written_size(image),
            "patch_size": image.patch,
            "num_channels": image.channels,
            "window_size": image.window,
        }

    keys = ("embed_dim", "hidden_size", "depths", "num_layers", "num_heads", "mlp_ratio")
    of_image = ("image_size", "patch_size", "num_channels", "window_size")
    return ConfigRule(keys=keys + of_image, read=read, write=write)


_BLOCK_NAMES = {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.o_proj": "attention.output.dense",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "input_layernorm": "layernorm_before",
    "post_attention_layernorm": "layernorm_after",
}


def _tensors() -> tuple[TensorRule, ...]:
    pairs = {
        "model.stages.0.embed_patches": "swin.embeddings.patch_embeddings.projection",
        "model.stages.0.embed_norm": "swin.embeddings.norm",
        "class_head.out": "classifier",
    }
    weights = {}
    for stage in range(_MOST_STAGES):
        ours, block = f"model.stages.{stage}.layers.{{layer}}", f"swin.encoder.layers.{stage}.blocks.{{layer}}"
        pairs |= {f"{ours}.{name}": f"{block}.{hf_name}" for name, hf_name in _BLOCK_NAMES.items()}
        # Only the last stage has a norm, and all others a merging.
        pairs[f"model.stages.{stage}.norm"] = "swin.layernorm"
        pairs[f"model.merges.{stage}.norm"] = f"swin.encoder.layers.{stage}.downsample.norm"
        table = f"{block}.attention.self.relative_position_bias_table"
        weights[f"{ours}.self_attn.relative_bias.weight"] = table
        weights[f"model.merges.{stage}.reduction.weight"] = f"swin.encoder.layers.{stage}.downsample.reduction.weight"
    weights |= {f"{a}.{part}": f"{b}.{part}" for a, b in pairs.items() for part in ("weight", "bias")}
    return tuple(rule for ours, name in weights.items() for rule in of_either_class(ours, "swin.", name))


SWIN = Family(
    model_type="swin",
    architecture="SwinModel",
    other_architectures=("SwinForImageClassification",),
    rules=(
        *UNUSED,
        DENSE,
        constant(causal=False, vocab_size=0, position="none", norm="layernorm", o_bias=True, ffn_bias=True),
        constant(embedding_norm=True, layers=("image_window", "shifted_window")),
        _stages(),
        same("layer_norm_eps", "norm_eps", default=1e-5),
        same("initializer_range", "init_std", default=0.02),
        same("qkv_bias", "qkv_bias", default=True),
        translated("hidden_act", "activation", ACTIVATIONS, default="gelu"),
        classes_of("SwinForImageClassification", class_pool="mean"),
        only("use_absolute_embeddings", False),
        only("hidden_dropout_prob", 0.0),
        unsupported_dropout("attention_probs_dropout_prob", 0.0),
        unsupported_dropout("drop_path_rate", 0.1, target="complete residual branches"),
    ),
    tensors=_tensors(),
    # Names of intermediate results, and heads for other tasks.
    ignored_keys=frozenset({"encoder_stride", "out_features", "out_indices", "stage_names", "path_norm"}),
    ignored_tensors=(r"(swin\.)?encoder\.layers\.\d+\.blocks\.\d+\.attention\.self\.relative_position_index",),
    other_heads=(r"classifier\.(weight|bias)",),
    auto_class="AutoModel",
    classifier="SwinForImageClassification",
    # transformers has no other one for it.
    image_processor="ViTImageProcessor",
)

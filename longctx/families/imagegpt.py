"""Image GPT: GPT-2 with RMSNorm, on the colors of a palette; its head never predicts the begin token, the last id.

``ForImageClassification`` has a class head on the mean over all pixels instead.
"""

from __future__ import annotations

import math
from typing import Any

from longctx.architecture.image import ImageShape
from longctx.errors import ConfigError
from longctx.families.config_rules import constant, integer, only, translated
from longctx.families.gpt import ACTIVATIONS, BUFFERS, GPT2_OPTIONS, STACK, gpt_tensor, matrices
from longctx.families.image_classes import classes_of
from longctx.families.spec import BLOCK, ConfigRule, Family, HfConfig, tensor


def _colors() -> ConfigRule:
    """Return the rule for the vocabulary: colors, which have an output each, and the begin token after them."""

    def read(hf: HfConfig) -> dict[str, Any]:
        size = integer(hf, "vocab_size")
        if size < 2:
            raise ConfigError(f"vocab_size={size} in config.json must be at least 2: a color and the begin token.")
        return {"vocab_size": size, "output_vocab_size": size - 1}

    # Another number of outputs reads back as this one, so the loss is detected.
    return ConfigRule(keys=("vocab_size",), read=read, write=lambda config: {"vocab_size": config.vocab_size})


def _images() -> ConfigRule:
    """Return the rule for the images' shape: config.json has only the number of pixels."""

    def read(hf: HfConfig) -> dict[str, Any]:
        pixels = integer(hf, "n_positions")
        side = math.isqrt(max(0, pixels))
        # Other images' sides are in the palette's file, if there is one.
        if side * side == pixels:
            return {"image": ImageShape(height=side, width=side)}
        return {"image": ImageShape(height=1, width=pixels)}

    # Positions are in reading order, so the weights' function does not depend on the sides.
    return ConfigRule(read=read)


_OWN = (
    _colors(),
    _images(),
    classes_of("ImageGPTForImageClassification", class_pool="mean", class_bias=False, token_head=False),
    # transformers calls it ImageGPTLayerNorm: it neither subtracts the mean nor adds a bias.
    constant(norm="rmsnorm", tie_embeddings=False),
    translated("activation_function", "activation", ACTIVATIONS, default="quick_gelu"),
    # A head with fewer rows than the table cannot be tied to it.
    only("tie_word_embeddings", False),
)

IMAGE_GPT = Family(
    model_type="imagegpt",
    architecture="ImageGPTForCausalImageModeling",
    other_architectures=("ImageGPTForImageClassification",),
    rules=STACK + GPT2_OPTIONS + _OWN,
    tensors=(
        gpt_tensor(("model.embed_tokens.weight",), "wte.weight"),
        gpt_tensor(("model.embed_positions.weight",), "wpe.weight"),
        *matrices(),
        gpt_tensor((f"{BLOCK}input_layernorm.weight",), "h.{layer}.ln_1.weight"),
        gpt_tensor((f"{BLOCK}post_attention_layernorm.weight",), "h.{layer}.ln_2.weight"),
        gpt_tensor(("model.norm.weight",), "ln_f.weight"),
        tensor("class_head.out.weight", "score.weight"),
    ),
    ignored_tensors=BUFFERS,
    auto_class="ImageGPTForCausalImageModeling",
    classifier="ImageGPTForImageClassification",
    image_processor="ImageGPTImageProcessor",
)

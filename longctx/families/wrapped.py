"""Text models within multi-part models: Gemma 3 and 4, Mistral Small 3, Qwen3.5 with a vision tower.

Such a model's config.json has its text model under ``text_config``. The text model is a family in ``family_registry``;
the other parts' tensors, and the keys that describe them, are kept unchanged from import to export.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from longctx.errors import ConfigError
from longctx.families.leftover import is_leftover
from longctx.families.spec import IGNORED_KEYS, HfConfig
from longctx.untrusted.strict_json import printable, shown

TEXT = "text_config"
_TIE = "tie_word_embeddings"
_QUANTIZED = "quantization_config"
_SHARED_KEYS = (_QUANTIZED, "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that apply to the text model too, if the full model's config.json has them."""
_PLAIN, _PLAIN_HEAD = "model.", "lm_head."
"""Name prefixes in a standalone text model."""


@dataclass(frozen=True, kw_only=True)
class NameMap:
    """One naming scheme for the parts' tensors."""

    text: str
    """Prefix that replaces ``model.`` of a standalone text model."""
    head: str
    """Prefix that replaces ``lm_head.``."""
    others: tuple[str, ...]
    """Name prefixes of the other parts."""

    @cached_property
    def _others(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.others)))

    def is_other(self, name: str) -> bool:
        """Return True if a tensor belongs to a part other than the text model."""
        return self._others.match(name) is not None

    def plain(self, name: str) -> str:
        """Return a tensor's name in a standalone text model; names in other parts are unchanged."""
        # Check other parts first: their names may begin like the text model's.
        for wrapped, plain in ((self.text, _PLAIN), (self.head, _PLAIN_HEAD)):
            if name.startswith(wrapped) and not self.is_other(name):
                return plain + name.removeprefix(wrapped)
        return name

    def wrapped(self, name: str) -> str:
        """Return the original name for one that ``plain`` returned."""
        for wrapped, plain in ((self.text, _PLAIN), (self.head, _PLAIN_HEAD)):
            if name.startswith(plain) and not self.is_other(name):
                return wrapped + name.removeprefix(plain)
        return name


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    """Multi-part model type with a text model that can be trained."""

    model_type: str
    architecture: str
    text_types: tuple[str, ...]
    """Model types that the text model may have; a config.json without one means the first."""
    name_maps: tuple[NameMap, ...]
    """All are read; a folder without other parts is written with the first."""
    keys: frozenset[str]
    """Keys in config.json next to ``text_config``; they describe the other parts and their connection."""
    ties: bool
    """transformers' value for ``tie_word_embeddings`` if it is absent."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys in ``text_config`` that the makers' files leave to transformers' class."""
    auto_class: str = "AutoModelForImageTextToText"

    def select_name_map(self, names: Iterable[str]) -> NameMap:
        """Return the naming scheme for a folder with these tensor names."""
        names = list(names)
        fitting = (one for one in self.name_maps if any(one.is_other(n) or one.plain(n) != n for n in names))
        # If no scheme fits, the later name checks report the tensors.
        return next(fitting, self.name_maps[0])


_LLAVA = (
    NameMap(
        text="language_model.model.",
        head="language_model.lm_head.",
        others=("vision_tower.", "multi_modal_projector."),
    ),
    NameMap(
        text="model.language_model.", head="lm_head.", others=("model.vision_tower.", "model.multi_modal_projector.")
    ),
)
"""As in most makers' files, and as in transformers' modules."""
_QWEN = (NameMap(text="model.language_model.", head="lm_head.", others=("model.visual.",)),)
_QWEN_KEYS = frozenset(
    {"vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"}
)
_GEMMA3_TEXT: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

_ALL = (
    Wrapper(
        model_type="gemma3",
        architecture="Gemma3ForConditionalGeneration",
        text_types=("gemma3_text",),
        name_maps=_LLAVA,
        keys=frozenset(
            {"vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"}
            | {"initializer_range"}
        ),
        ties=True,
        defaults=_GEMMA3_TEXT,
    ),
    Wrapper(
        model_type="gemma4",
        architecture="Gemma4ForConditionalGeneration",
        text_types=("gemma4_text",),
        name_maps=(
            NameMap(
                text="model.language_model.",
                head="lm_head.",
                others=("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
            ),
        ),
        keys=frozenset(
            {"vision_config", "audio_config", "image_token_id", "video_token_id", "audio_token_id", "boi_token_id"}
            | {"eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index", "vision_soft_tokens_per_image"}
            | {"initializer_range"}
        ),
        ties=True,
    ),
    Wrapper(
        model_type="mistral3",
        architecture="Mistral3ForConditionalGeneration",
        text_types=("mistral", "ministral3"),
        name_maps=_LLAVA,
        keys=frozenset(
            {"vision_config", "image_token_index", "projector_hidden_act", "vision_feature_layer"}
            | {"multimodal_projector_bias", "spatial_merge_size"}
        ),
        # transformers does not tie if a file has two matrices, as these files do.
        ties=False,
    ),
    Wrapper(
        model_type="qwen3_5",
        architecture="Qwen3_5ForConditionalGeneration",
        text_types=("qwen3_5_text",),
        name_maps=_QWEN,
        keys=_QWEN_KEYS,
        ties=False,
    ),
    Wrapper(
        model_type="qwen3_5_moe",
        architecture="Qwen3_5MoeForConditionalGeneration",
        text_types=("qwen3_5_moe_text",),
        name_maps=_QWEN,
        keys=_QWEN_KEYS,
        ties=False,
    ),
)
WRAPPERS: dict[str, Wrapper] = {wrapper.model_type: wrapper for wrapper in _ALL}


ALIASES = {"kimi_k2": "deepseek_v3"}
"""Types with another type's network, config.json and tensors; exports use that type, which transformers has."""


def wrapper_of(config: HfConfig) -> Wrapper | None:
    """Return the wrapper for a config.json's text model; None for a standalone text model."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return None
    return WRAPPERS.get(model_type)


def unwrap_config(config: HfConfig) -> dict[str, Any]:
    """Return the text model's config: a wrapped model's ``text_config``, completed, or the config itself.

    Its ``model_type`` is a family's, even if the config uses an alias. Raise ConfigError if the text model is not
    supported, and for unknown keys next to it.
    """
    wrapper = wrapper_of(config)
    if wrapper is None:
        model_type = config.get("model_type")
        if isinstance(model_type, str) and model_type in ALIASES:
            return {**config, "model_type": ALIASES[model_type]}
        return dict(config)
    _check_outer_keys(config, wrapper)
    # The table itself is untrusted, like the rest of the file.
    text = config.get(TEXT)
    if not isinstance(text, dict):
        raise ConfigError(f"{TEXT}={shown(text)} in a {wrapper.model_type} config.json must be a table.")
    # In order of precedence: the file's own values override the class defaults.
    found = {"model_type": wrapper.text_types[0], **wrapper.defaults, **text}
    if found["model_type"] not in wrapper.text_types:
        raise ConfigError(
            f"{TEXT}.model_type={shown(found['model_type'])} is not supported within {wrapper.model_type}; supported: "
            f"{', '.join(wrapper.text_types)}."
        )
    # The full model's value counts, not a part's.
    found[_TIE] = config.get(_TIE, text.get(_TIE, wrapper.ties))
    # The class inside is not the one that loads the full model.
    found.pop("architectures", None)
    return found | {key: config[key] for key in _SHARED_KEYS if config.get(key) is not None}


def _check_outer_keys(config: HfConfig, wrapper: Wrapper) -> None:
    """Raise ConfigError for another class, and for unknown keys next to the text model."""
    if config.get("architectures") not in (None, [wrapper.architecture]):
        raise ConfigError(
            f"architectures={shown(config['architectures'])} is not supported; {wrapper.model_type} means "
            f"{wrapper.architecture}."
        )
    known = wrapper.keys | IGNORED_KEYS | {TEXT, _TIE, _QUANTIZED}
    # Keys that only control how transformers runs a model are irrelevant here too.
    unknown = sorted(key for key in set(config) - known if not is_leftover(key, config[key]))
    if unknown:
        key_list = ", ".join(f"{printable(key)}={shown(config[key])}" for key in unknown[:12])
        raise ConfigError(
            f"config.json keys that longctx does not read for a {wrapper.model_type} model: {key_list}.\n"
            "If they change the text model, it is not supported. Otherwise delete them."
        )


def rewrap_config(original: HfConfig, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return a wrapped model's config.json with this text model; other parts are as in ``original``."""
    # The full model's class loads the export, even if the text model names another.
    found = {**original, TEXT: {key: value for key, value in text.items() if key != "architectures"}}
    # Exports are not quantised.
    found.pop(_QUANTIZED, None)
    of_both = {key: text[key] for key in (*_SHARED_KEYS, "torch_dtype") if key in original and key in text}
    return found | of_both | {_TIE: text[_TIE], "dtype": text["dtype"]}

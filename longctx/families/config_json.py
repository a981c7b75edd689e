"""Conversion between config.json and ModelFields, and the search for a family that fits a ModelFields."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from longctx.architecture.fields import ModelFields, names_of_role
from longctx.architecture.image import ImageShape
from longctx.architecture.model_rules import check_model
from longctx.errors import ConfigError
from longctx.families.family_registry import FAMILIES
from longctx.families.leftover import how_to_delete, is_leftover, leftover_keys
from longctx.families.quantization import KEYS as QUANTIZATION_KEYS
from longctx.families.quantization import quantization_of
from longctx.families.rope_rules import effective_rope
from longctx.families.spec import IGNORED_KEYS, Family
from longctx.families.wrapped import ALIASES, WRAPPERS, unwrap_config, wrapper_of
from longctx.untrusted.strict_json import printable, shown

_NAMED_KEYS = 12
"""Unknown keys to name in a message."""
_NOT_AT_ALL = "all of it"


def config_from_hf(config: dict[str, Any], *, mtp: bool = False) -> dict[str, Any]:
    """Return the ModelConfig fields, by name, that a Hugging Face config.json describes.

    For a multi-part model, they are the text model's. Multi-token prediction blocks belong to the decoder only with
    ``mtp``. Raise ConfigError if the config needs anything that this decoder does not support; the message names the
    key, its value and the supported values.
    """
    config = unwrap_config(config)
    family = _get_family(config.get("model_type"))
    named = config.get("architectures")
    if named not in (None, [family.architecture]) and named not in [[name] for name in family.other_architectures]:
        raise ConfigError(
            f"architectures={shown(named)} is not supported; {family.model_type} means {family.architecture}."
        )
    # Rejects schemes that cannot be read; the network does not depend on the scheme.
    quantization_of(config)
    values: dict[str, Any] = {}
    for rule in family.rules:
        values |= rule.read(config)
    # An unknown key may change the model: it is rejected, never ignored.
    known = _known_keys(family).union(QUANTIZATION_KEYS)
    unknown = sorted(key for key in set(config) - known if not is_leftover(key, config[key]))
    if unknown:
        key_list = ", ".join(f"{printable(key)}={shown(config[key])}" for key in unknown[:_NAMED_KEYS])
        if len(unknown) > _NAMED_KEYS:
            key_list += f" and {len(unknown) - _NAMED_KEYS} more"
        raise ConfigError(
            f"config.json keys that longctx does not read for a {family.model_type} model: {key_list}.\n"
            f"{how_to_delete(unknown)}"
        )
    if not mtp:
        values.pop("mtp_layers", None)
    return values


def ignored_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json keys, with their values, that other tools left and that do not affect the network."""
    config = unwrap_config(config)
    return leftover_keys(config, _known_keys(_get_family(config.get("model_type"))))


def auto_class(config: dict[str, Any]) -> str:
    """Return the transformers class that loads a config.json's model."""
    wrapper = wrapper_of(config)
    if wrapper is not None:
        return wrapper.auto_class
    text = unwrap_config(config)
    family = _get_family(text.get("model_type"))
    if family.classifier and text.get("architectures") == [family.classifier]:
        return "AutoModelForImageClassification"
    return family.auto_class


def _known_keys(family: Family) -> frozenset[str]:
    """Return every key of config.json that the family's rules read, or that is irrelevant in every family."""
    return IGNORED_KEYS.union(family.ignored_keys, family.passthrough_keys, *(rule.keys for rule in family.rules))


def config_to_hf(config: ModelFields, *, model_type: str | None = None, own_tokenizer: bool = False) -> dict[str, Any]:
    """Return a config.json that transformers 4 and 5 read as this model; raise ConfigError if no family supports it.

    ``model_type`` and ``own_tokenizer`` select among several families that do (see ``family_of``). The caller adds
    dtype and token ids.
    """
    return _write_config(family_of(config, model_type=model_type, own_tokenizer=own_tokenizer), config)


@lru_cache(maxsize=256)
def family_of(config: ModelFields, *, model_type: str | None = None, own_tokenizer: bool = False) -> Family:
    """Return a family that can express the full config; raise ConfigError naming the nearest family's losses.

    If there are several, prefer ``model_type``, then the first. ``own_tokenizer`` excludes families for which
    transformers would not load a tokenizer that we trained.
    """
    # A stable sort: the requested family first, the others in table order.
    order = sorted(FAMILIES.values(), key=lambda family: family.model_type != model_type)
    reasons = {}
    for family in order:
        if own_tokenizer and family.forces_own_tokenizer:
            continue
        unsupported = unsupported_fields(family, config)
        if not unsupported:
            return family
        reasons[family.model_type] = unsupported
    nearest = min(reasons, key=lambda name: _distance(reasons[name]))
    field_lines = "\n".join(f"  {name}: {value}" for name, value in reasons[nearest].items())
    raise ConfigError(
        f"no supported Hugging Face family can express this model; supported: {sorted(FAMILIES)}.\n"
        f"The nearest is {nearest}, whose config.json cannot express\n{field_lines}"
    )


def _distance(unsupported: dict[str, str]) -> tuple[bool, bool, int]:
    """Return the distance between the model and a family that loses these fields."""
    # A family without experts loses only num_experts, and the fields that depend on it are not counted.
    return _NOT_AT_ALL in unsupported, "model.num_experts" in unsupported, len(unsupported)


def unsupported_fields(family: Family, config: ModelFields) -> dict[str, str]:
    """Return the fields that the family's config.json reads back differently: name -> original and new value."""
    # Writing and reading back finds all losses without a list of what a family supports.
    try:
        reread = ModelFields(**config_from_hf(_write_config(family, config), mtp=True))
        check_model(reread)
    except ConfigError as error:
        return {_NOT_AT_ALL: str(error)}
    expected, actual = canonical_fields(config), canonical_fields(reread)
    # A field in only one of them depends on another field, which differs too.
    return {
        f"model.{name}": f"{expected[name]!r} (it would become {actual[name]!r})"
        for name in expected
        if name in actual and expected[name] != actual[name]
    }


def dropped_training_fields(config: ModelFields, hf: dict[str, Any]) -> dict[str, Any]:
    """Return training settings that this config.json does not have: name -> value. Defaults are not listed."""
    written = config_from_hf(hf)
    dropped: dict[str, Any] = {}
    # A reader of the folder has weights already, so the initial embedding scale is of no use there.
    for name in sorted(names_of_role("training") - {"embedding_std"}):
        value, default = getattr(config, name), getattr(ModelFields(), name)
        if value not in (written.get(name, default), default):
            dropped[name] = value
    return dropped


def canonical_fields(config: ModelFields) -> dict[str, Any]:
    """Return the fields that determine the weights' function, in a canonical form.

    Fields for training only are left out; ``dropped_training_fields`` returns them.
    """
    values = {f.name: getattr(config, f.name) for f in fields(ModelFields) if f.name not in _unused_fields(config)}
    # Layer by layer: ("full", "window") over four layers equals naming all four.
    every = range(config.num_layers)
    values["layers"] = tuple(config.layer_kind(layer) for layer in every)
    # Resolve defaults, so that 0 and the explicit value compare equal.
    values["attention_scale"] = config.attention_scale or config.head_dim**-0.5
    if "global" in config.layers:
        values["global_head_dim"] = config.global_head_dim or config.head_dim
        values["global_kv_heads"] = config.global_kv_heads or config.num_kv_heads
    values["value_head_dim"] = config.value_dim
    sizes = config.delta_sizes
    values |= {"delta_key_heads": sizes.key_heads, "delta_value_heads": sizes.value_heads}
    values |= {"delta_key_dim": sizes.key_dim, "delta_value_dim": sizes.value_dim}
    if config.position == "rope":
        values["rope_layers"] = tuple(config.has_rope(layer) for layer in every)
        rope_per_layer = [config.rope_of(layer) for layer in every if config.has_rope(layer)]
        values["rope"] = [effective_rope(rope, config.rotary_size) for rope in rope_per_layer]
        # A rope shared by all layers is stored once, so that a family with a single rope can express it.
        if all(rope == values["rope"][0] for rope in values["rope"]):
            values["rope"] = values["rope"][:1]
    # The image processor's file has these two, and the sides of images whose tokens are pixels.
    values["image"] = replace(config.image, mean=(0.5,), std=(0.5,))
    if not config.image.patch:
        values["image"] = ImageShape()
    # Selecting from all groups is the same as having no groups.
    if config.groups_per_token == config.expert_groups and config.num_experts:
        values["expert_groups"] = values["groups_per_token"] = 1
    return values


def _unused_fields(config: ModelFields) -> frozenset[str]:
    """Return the fields that a model with this config does not use."""
    unused = set(names_of_role("training"))
    if not config.num_experts:
        unused |= names_of_role("experts")
    elif len(config.dense_layers) < config.num_layers:
        if not config.dense_layers:
            unused |= {"ffn_size", "ffn_bias"}
        if not config.shared_ffn_size:
            unused.add("shared_gate")
    if not config.predicts_tokens:
        unused |= {"output_vocab_size", "tie_embeddings"}
    if config.norm == "layernorm":
        unused.add("norm_offset")
    if config.position != "learned":
        unused.add("max_positions")
    if config.position != "t5":
        unused |= {"relative_buckets", "relative_max_distance"}
    if config.position != "rope":
        unused |= {"rope", "rope_layers"}
    # ``canonical_fields`` includes it in each layer's rope.
    unused.add("local_rope_theta")
    return frozenset(unused)


def _write_config(family: Family, config: ModelFields) -> dict[str, Any]:
    """Return the family's config.json for this config, even if it cannot express every field."""
    hf: dict[str, Any] = {"model_type": family.model_type, "architectures": [family.architecture]}
    for rule in family.rules:
        hf |= rule.write(config)
    return hf


def _get_family(model_type: Any) -> Family:
    """Return the family for a model_type; raise ConfigError if this decoder does not support it."""
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    supported = sorted({*FAMILIES, *WRAPPERS, *ALIASES})
    raise ConfigError(f"model_type={shown(model_type)} is not supported; supported: {supported}.")

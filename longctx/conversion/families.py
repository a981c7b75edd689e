"""One table a family: which Hugging Face config keys and tensors a decoder's fields and parameters are, both ways.

Sizes in tensor shapes: ``V`` vocabulary, ``M`` model width, ``H`` query heads, ``K`` key/value heads, ``D`` head size,
``F`` dense FFN width, ``E`` experts, ``X`` width of one expert, ``S`` width of the shared expert;
``HD`` is H·D and ``2X`` 2·X.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.rope import Rope

REQUIRED = object()
"""Default of a key that a config.json must have: the family's own default is too easily not what was meant."""

EMBEDDINGS = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor of a Hugging Face file."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A parameter of the decoder and the ways it lies on disk.

    Each layout lists parts whose flattened values, one after the other, are the flattened parameter (experts stacked
    on the first axis, gate rows before up rows: both are concatenations). The first layout is written; all are read.
    """

    name: str
    shape: tuple[int, ...]
    layouts: tuple[tuple[Part, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Everything that tells one Hugging Face architecture from another."""

    model_type: str
    architecture: str
    has_shape_of: Callable[[ModelConfig], bool]
    """Whether a decoder of this config is a model of the family."""
    field_keys: dict[str, str]
    """Config key -> ModelConfig field, beyond the common ones."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """What Hugging Face takes for an absent key; keys in neither table are required."""
    fixed_fields: dict[str, Any] = field(default_factory=dict)
    """ModelConfig fields that the family leaves no choice in."""
    only: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Config key -> the values this decoder can be. The first is written, and is what an absent key means unless
    ``defaults`` says otherwise."""
    ignored: frozenset[str] = frozenset()
    """Keys without a meaning in the models we accept."""
    block_tensors: dict[str, str]
    """Tensors of one block and their shapes; ``{expert}`` in a disk name runs over E."""
    fused_tensors: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = field(default_factory=dict)
    """Parameter -> (shape, the tensors of one expert on disk with their shapes), stacked over experts."""
    forces_own_tokenizer: bool = False
    """Whether transformers 5 loads the family's own tokenizer class, whatever tokenizer_config.json says."""
    heads_divide_width: bool = False
    """Whether transformers refuses a hidden_size that is no multiple of the head count."""


_COMMON_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_positions",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "initializer_range": "init_std",
    "intermediate_size": "ffn_size",
}
_COMMON_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02}
_COMMON_ONLY = {"hidden_act": ("silu",), "attention_dropout": (0.0, None)}
_NEVER_WRITTEN = {"is_encoder_decoder": (False,), "partial_rotary_factor": (1.0, None), "per_layer_config": (None,)}
_IGNORED = frozenset(
    {
        *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "output_attentions", "output_hidden_states", "return_dict"),
        *("chunk_size_feed_forward", "id2label", "label2id", "problem_type"),
        *("rope_theta", "rope_scaling", "rope_parameters", "layer_types"),  # looked at one by one below
    }
)
_DEFAULT_THETA = 10_000.0

_ATTENTION = {
    "input_layernorm.weight": "M",
    "self_attn.q_proj.weight": "HD M",
    "self_attn.k_proj.weight": "KD M",
    "self_attn.v_proj.weight": "KD M",
    "self_attn.o_proj.weight": "M HD",
    "post_attention_layernorm.weight": "M",
}
_QKV_BIAS = {"self_attn.q_proj.bias": "HD", "self_attn.k_proj.bias": "KD", "self_attn.v_proj.bias": "KD"}
_DENSE = {"mlp.gate_proj.weight": "F M", "mlp.up_proj.weight": "F M", "mlp.down_proj.weight": "M F"}
_ROUTER = {"mlp.gate.weight": "E M"}
_SHARED_EXPERT = {
    "mlp.shared_expert.gate_proj.weight": "S M",
    "mlp.shared_expert.up_proj.weight": "S M",
    "mlp.shared_expert.down_proj.weight": "M S",
    "mlp.shared_expert_gate.weight": "1 M",
}
_EXPERTS = {
    "mlp.experts.gate_up_proj": (
        "E 2X M",
        (("mlp.experts.{expert}.gate_proj.weight", "X M"), ("mlp.experts.{expert}.up_proj.weight", "X M")),
    ),
    "mlp.experts.down_proj": ("E M X", (("mlp.experts.{expert}.down_proj.weight", "M X"),)),
}

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="qwen2_moe",
            architecture="Qwen2MoeForCausalLM",
            has_shape_of=lambda c: c.num_experts > 0 and c.shared_ffn_size > 0,
            field_keys={
                "qkv_bias": "qkv_bias",
                "num_experts": "num_experts",
                "num_experts_per_tok": "experts_per_token",
                "moe_intermediate_size": "expert_ffn_size",
                "shared_expert_intermediate_size": "shared_ffn_size",
                "norm_topk_prob": "normalize_gates",
                "router_aux_loss_coef": "balance_loss_weight",
            },
            defaults={"qkv_bias": True, "norm_topk_prob": False, "router_aux_loss_coef": 0.001},
            only={"use_sliding_window": (False,), "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
            ignored=frozenset({"sliding_window", "max_window_layers", "output_router_logits"}),
            block_tensors=_ATTENTION | _QKV_BIAS | _ROUTER | _SHARED_EXPERT,
            fused_tensors=_EXPERTS,
        ),
        Family(
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            has_shape_of=lambda c: c.num_experts == 0 and c.qkv_bias,
            field_keys={},
            fixed_fields={"qkv_bias": True, "num_experts": 0},
            only={"use_sliding_window": (False,)},
            ignored=frozenset({"sliding_window", "max_window_layers"}),
            block_tensors=_ATTENTION | _QKV_BIAS | _DENSE,
            forces_own_tokenizer=True,
        ),
        Family(  # the same network as qwen2, for models with a tokenizer of their own
            model_type="seed_oss",
            architecture="SeedOssForCausalLM",
            has_shape_of=lambda c: c.num_experts == 0 and c.qkv_bias,
            field_keys={"attention_bias": "qkv_bias"},
            defaults={"attention_bias": True, "head_dim": 128, "attention_dropout": 0.1, "residual_dropout": 0.1},
            fixed_fields={"num_experts": 0},
            only={
                "attention_out_bias": (False,),
                "mlp_bias": (False,),
                "residual_dropout": (0.0,),
                "pretraining_tp": (1,),
            },
            block_tensors=_ATTENTION | _QKV_BIAS | _DENSE,
        ),
        Family(
            model_type="llama",
            architecture="LlamaForCausalLM",
            has_shape_of=lambda c: c.num_experts == 0 and not c.qkv_bias,
            field_keys={},
            fixed_fields={"qkv_bias": False, "num_experts": 0},
            only={"attention_bias": (False,), "mlp_bias": (False,), "pretraining_tp": (1,)},
            block_tensors=_ATTENTION | _DENSE,
            heads_divide_width=True,
        ),
    )
}


# ---------------------------------------------------------------------------------------------------- configs


def config_from_hf(config: dict[str, Any]) -> ModelConfig:
    """The ModelConfig that a Hugging Face config.json describes.

    ConfigError where it asks for anything this decoder does not do: it names the key, the value and what is supported.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConfigError(f"model_type={model_type!r} is not supported; these are: {sorted(FAMILIES)}.")
    _check_architecture(family, config)
    _check_fixed_keys(family, config)
    values = {name: _field_value(family, config, key) for key, name in (_COMMON_KEYS | family.field_keys).items()}
    return ModelConfig(**values, **family.fixed_fields, rope=Rope(theta=_rope_theta(config)))


def config_to_hf(config: ModelConfig, *, model_type: str | None = None, own_tokenizer: bool = False) -> dict[str, Any]:
    """A config.json that transformers 4 and 5 read as this model; ConfigError where no family has its shape.

    ``model_type`` and ``own_tokenizer`` choose between families of the same shape (see ``family_of``). Fields that
    the family has no key for are left out; dtype and token ids are the caller's to add.
    """
    family = family_of(config, model_type=model_type, own_tokenizer=own_tokenizer)
    if family.heads_divide_width and config.hidden_size % config.num_heads:
        width = math.ceil(config.hidden_size / config.num_heads) * config.num_heads
        raise ConfigError(
            f"model.hidden_size={config.hidden_size} is no multiple of model.num_heads={config.num_heads}, which "
            f"transformers wants of a {family.model_type} model. Try model.hidden_size={width}."
        )
    keys = _COMMON_KEYS | family.field_keys
    only = _COMMON_ONLY | family.only
    return {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        **{key: getattr(config, name) for key, name in keys.items()},
        **{key: supported[0] for key, supported in only.items()},
        "rope_theta": config.rope.theta,  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},  # transformers 5
    }


def family_of(config: ModelConfig, *, model_type: str | None = None, own_tokenizer: bool = False) -> Family:
    """The family whose models have this config's shape; ConfigError when there is none.

    Of several it is ``model_type`` if that is one of them, else the first. ``own_tokenizer`` leaves out families for
    which transformers would not load the tokenizer that we trained.
    """
    fitting = {name: family for name, family in FAMILIES.items() if family.has_shape_of(config)}
    if own_tokenizer:
        fitting = {name: family for name, family in fitting.items() if not family.forces_own_tokenizer}
    if fitting:
        return fitting.get(model_type or "", next(iter(fitting.values())))
    raise ConfigError(
        f"no supported Hugging Face family has routed experts without a shared one (model.num_experts="
        f"{config.num_experts}, model.shared_ffn_size={config.shared_ffn_size}); supported: {sorted(FAMILIES)}.\n"
        "Set model.shared_ffn_size (qwen2_moe), or model.num_experts=0."
    )


def _check_architecture(family: Family, config: dict[str, Any]) -> None:
    named = config.get("architectures")
    if named is not None and named != [family.architecture]:
        raise ConfigError(f"architectures={named} is not supported; {family.model_type} means {family.architecture}.")


def _check_fixed_keys(family: Family, config: dict[str, Any]) -> None:
    only = _COMMON_ONLY | _NEVER_WRITTEN | family.only
    for key, supported in only.items():
        value = config.get(key, family.defaults.get(key, supported[0]))
        if not any(value == s and isinstance(value, bool) == isinstance(s, bool) for s in supported):
            choices = " or ".join("absent" if s is None else repr(s) for s in supported)
            raise ConfigError(f"{key}={value!r} is not supported by this decoder; supported: {choices}.")
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or set(kinds) - {"full_attention"}):
        raise ConfigError(f"layer_types={kinds!r} is not supported by this decoder; supported: only full_attention.")
    known = set(only) | set(_COMMON_KEYS) | set(family.field_keys) | _IGNORED | family.ignored
    if unknown := sorted(set(config) - known):
        listed = ", ".join(f"{key}={config[key]!r}" for key in unknown)
        raise ConfigError(
            f"keys of config.json that mean nothing to a {family.model_type} model here: {listed}.\n"
            "Remove them if they do not change the model; if they do, it is not supported."
        )


def _field_value(family: Family, config: dict[str, Any], key: str) -> Any:
    """A key's value as its ModelConfig field wants it; absent keys get what transformers would take."""
    name = (_COMMON_KEYS | family.field_keys)[key]
    value = config.get(key, (_COMMON_DEFAULTS | family.defaults).get(key, REQUIRED))
    if key == "head_dim" and value in (REQUIRED, None):
        return _field_value(family, config, "hidden_size") // _field_value(family, config, "num_attention_heads")
    if key == "num_key_value_heads" and value in (REQUIRED, None) and family.model_type == "llama":
        return _field_value(family, config, "num_attention_heads")
    if value is REQUIRED:
        raise ConfigError(f"config.json of a {family.model_type} model has no {key}.")
    wanted = {f.name: f.type for f in fields(ModelConfig)}[name]
    if wanted == "float" and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if type(value).__name__ != wanted:
        raise ConfigError(f"{key}={value!r} in config.json must be of type {wanted}.")
    return value


def _rope_theta(config: dict[str, Any]) -> float:
    """The rotary base, wherever this version of transformers keeps it; ConfigError for any kind of scaling."""
    found = {"rope_theta": config["rope_theta"]} if config.get("rope_theta") is not None else {}
    for key in ("rope_parameters", "rope_scaling"):
        rope = {} if config.get(key) is None else config[key]
        if not isinstance(rope, dict) or not _is_plain_rope(rope):
            raise ConfigError(f"{key}={rope!r} is not supported by this decoder; supported: rope_type 'default'.")
        if rope.get("rope_theta") is not None:
            found[f"{key}.rope_theta"] = rope["rope_theta"]
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{key}={value!r} in config.json must be a positive number.")
    if len(set(found.values())) > 1:
        raise ConfigError(f"config.json contradicts itself: {found}. Keep one of them.")
    return float(next(iter(found.values()), _DEFAULT_THETA))


def _is_plain_rope(rope: dict[str, Any]) -> bool:
    kinds = {rope.get("rope_type", "default"), rope.get("type", "default")}
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    return kinds == {"default"} and not set(rope) - known and rope.get("partial_rotary_factor", 1.0) in (1.0, None)


# ---------------------------------------------------------------------------------------------------- tensors


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """Every parameter of a decoder of this config, in the model's order, with its layouts on disk."""
    family, size = family_of(config), _sizes(config)
    specs = [_plain(EMBEDDINGS, "V M", size)]
    for layer in range(config.num_layers):
        specs += _block_specs(family, config, f"model.layers.{layer}.", size)
    specs.append(_plain("model.norm.weight", "M", size))
    if not config.tie_embeddings:
        specs.append(_plain(HEAD, "V M", size))
    return specs


def _block_specs(family: Family, config: ModelConfig, prefix: str, size: dict[str, int]) -> Iterator[TensorSpec]:
    for name, dims in family.block_tensors.items():
        if name not in _QKV_BIAS or config.qkv_bias:
            yield _plain(prefix + name, dims, size)
    for name, (dims, parts) in family.fused_tensors.items():
        per_expert = tuple(
            Part(name=prefix + part.format(expert=e), shape=_shape(part_dims, size))
            for e in range(config.num_experts)
            for part, part_dims in parts
        )
        whole = _plain(prefix + name, dims, size)
        yield TensorSpec(name=whole.name, shape=whole.shape, layouts=(per_expert, *whole.layouts))


def _plain(name: str, dims: str, size: dict[str, int]) -> TensorSpec:
    shape = _shape(dims, size)
    return TensorSpec(name=name, shape=shape, layouts=((Part(name=name, shape=shape),),))


def _shape(dims: str, size: dict[str, int]) -> tuple[int, ...]:
    """``"E 2X M"`` -> (E, 2·X, M)."""
    return tuple(math.prod(int(c) if c.isdigit() else size[c] for c in dim) for dim in dims.split())


def _sizes(config: ModelConfig) -> dict[str, int]:
    return {
        "V": config.vocab_size,
        "M": config.hidden_size,
        "H": config.num_heads,
        "K": config.num_kv_heads,
        "D": config.head_dim,
        "F": config.ffn_size,
        "E": config.num_experts,
        "X": config.expert_ffn_size,
        "S": config.shared_ffn_size,
    }

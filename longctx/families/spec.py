"""Building blocks for a family's table. Every entry serves both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from longctx.architecture.fields import ModelFields
from longctx.errors import ConfigError
from longctx.untrusted.strict_json import shown

HfConfig = Mapping[str, Any]
"""A parsed config.json."""


IGNORED_KEYS = frozenset(
    (
        # Checked by ``config_from_hf`` itself, or read by ``conversion``.
        "architectures", "model_type", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id",
        # File origin, and transformers' options for running the model.
        "transformers_version", "_name_or_path", "auto_map", "use_cache", "cache_implementation", "output_attentions",
        "output_hidden_states", "return_dict", "chunk_size_feed_forward", "_attn_implementation_autoset",
        "_attn_implementation", "attn_implementation",
        # From classifiers, which a decoder is not.
        "id2label", "label2id", "problem_type",
    )
)  # fmt: skip
"""Keys in config.json that do not describe any family's network."""


START_KEY = "decoder_start_token_id"
"""Token before a target's first token, in a model that reads a source."""
TARGET_ID_KEYS = (START_KEY, "forced_bos_token_id", "forced_eos_token_id")
"""Token ids that only such a model's config.json has, read by ``conversion``: the start, and tokens that generation
always puts first and last."""


@dataclass(frozen=True, kw_only=True)
class ConfigRule:
    """Keys in config.json and the ModelFields values that they determine."""

    keys: tuple[str, ...] = ()
    """Every key that the rule reads; a key outside all rules of a family is rejected."""
    read: Callable[[HfConfig], dict[str, Any]]
    """From config.json to ModelFields values; raises ConfigError for values that the decoder does not support."""
    write: Callable[[ModelFields], dict[str, Any]] = lambda _: {}
    """From a config to keys. Reading them back reveals values that they cannot express."""


@dataclass(frozen=True, kw_only=True)
class StorageLayout:
    """One way to store parameters in files.

    The parameters, concatenated along their first axis, go through ``steps`` (``LAYOUT_STEPS``), and are then flattened
    and cut into the tensors with these names.
    """

    names: tuple[str, ...]
    """``{layer}`` is the layer number; names with ``{expert}`` repeat for every expert. Empty if the parameter is zero
    in files without it (read, never written)."""
    steps: tuple[str, ...] = ()
    widths: Callable[[ModelFields], Sequence[int]] | None = None
    """Row count for each named tensor; None for equal parts."""
    rows: Callable[[ModelFields], Sequence[int]] | None = None
    """Row on disk for each row of the concatenated parameters; None for the same order."""
    swaps_halves: bool = False
    """True if the two halves of each row are exchanged on disk."""


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """Parameters with names or layouts on disk other than the decoder's own."""

    parameters: tuple[str, ...]
    layouts: tuple[StorageLayout, ...]
    """The first is written, all are read."""
    condition: Callable[[ModelFields], bool] = lambda _: True
    """True if the rule applies to this config; if several apply to one parameter, the last one counts."""
    layer_condition: Callable[[ModelFields, int], bool] = lambda *_: True
    """True if the rule applies to this layer, for parameters that belong to one."""


@dataclass(frozen=True, kw_only=True)
class MtpStorage:
    """Disk names for a family's multi-token prediction blocks, which follow the last layer."""

    key: str
    """Key with the number of blocks."""
    block: str = "model.layers.{layer}."
    """Prefix of a block's names: ``{layer}`` continues the layer numbers, ``{k}`` counts from 0."""
    others: tuple[str, ...] = (
        "model.layers.{layer}.enorm.weight",
        "model.layers.{layer}.hnorm.weight",
        "model.layers.{layer}.eh_proj.weight",
        "model.layers.{layer}.shared_head.norm.weight",
    )
    """Norms for the embedding and the hidden states, their joint projection, and the norm after the block."""
    hidden_first: bool = False
    """True if the projection takes the hidden state before the embedding."""
    copies: tuple[str, ...] = ()
    """Names for the embedding table and the output matrix, which a block may store a second time."""
    most: int = 64
    """Largest number of blocks that files can have."""

    def count(self) -> ConfigRule:
        """Return the rule for the number of blocks."""
        key, most = self.key, self.most

        def read(hf: HfConfig) -> dict[str, Any]:
            count = hf.get(key, 0)
            if type(count) is not int or not 0 <= count <= most:
                raise ConfigError(f"{key}={shown(count)} in config.json must be between 0 and {most}.")
            return {"mtp_layers": count}

        return ConfigRule(keys=(key,), read=read, write=lambda config: {key: config.mtp_layers})

    def tensors(self) -> tuple[TensorRule, ...]:
        """Return the rules for tensors that an ordinary block does not have."""
        rules = [tensor(ours, hf_name) for ours, hf_name in zip(MTP_PARTS, self.others, strict=True)]
        if self.hidden_first:
            rules[2] = replace(rules[2], layouts=(StorageLayout(names=(self.others[2],), swaps_halves=True),))
        return tuple(rules)


MTP_PARTS = tuple(f"model.mtp.{{layer}}.{name}.weight" for name in ("join.enorm", "join.hnorm", "join.eh_proj", "norm"))


@dataclass(frozen=True, kw_only=True)
class Family:
    """A Hugging Face architecture, by its differences from the others."""

    model_type: str
    architecture: str
    rules: tuple[ConfigRule, ...]
    other_architectures: tuple[str, ...] = ()
    """Further classes that are read: the same model without a part that is known to be zero, or with an extra head, by
    a rule for the key."""
    tensors: tuple[TensorRule, ...] = ()
    """Parameters without a rule have the decoder's names on disk."""
    ignored_keys: frozenset[str] = frozenset()
    """Keys in config.json without a meaning in a decoder, in addition to ``IGNORED_KEYS``."""
    default_ids: Mapping[str, int] = field(default_factory=dict)
    """Token ids that transformers' class assumes if keys are absent."""
    ignored_tensors: tuple[str, ...] = (
        r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        r"model\.rotary_emb\.inv_freq",
    )
    """Full-name patterns for buffers that old transformers versions saved, here rotary frequencies."""
    other_heads: tuple[str, ...] = ()
    """Full-name patterns for heads that the model does not have here; their tensors are left out, and logged."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Duplicate tensors that a file may contain, and the originals that they equal."""
    head: str = "lm_head.weight"
    """Output matrix name, which a tied model's file may contain in addition to the embeddings."""
    auto_class: str = "AutoModelForCausalLM"
    """transformers class that loads the model: an ``Auto`` class, or the model's own if no such class has it."""
    classifier: str = ""
    """Architecture with a class head, which ``AutoModelForImageClassification`` loads; empty if the family has none."""
    image_processor: str = ""
    """transformers class that makes the model's input from images, described by its own file; empty for texts."""
    mtp: MtpStorage | None = None
    """Multi-token prediction blocks; those that the decoder does not have are kept for exports."""
    passthrough_tensors: tuple[str, ...] = ()
    """Full-name patterns for parts that the decoder does not have; exports get their tensors unchanged."""
    passthrough_keys: tuple[str, ...] = ()
    """Keys in config.json that describe these parts; a dot leads into a table. The decoder does not depend on them."""
    forces_own_tokenizer: bool = False
    """True if transformers 5 always loads the family's own tokenizer class, ignoring tokenizer_config.json."""


# --- routed experts on disk ---

BLOCK = "model.layers.{layer}."
ENCODER_BLOCK = "encoder.layers.{layer}."
"""Name prefix in the encoder of an encoder-decoder."""
MLP = BLOCK + "mlp."


def per_expert(gate: str, up: str, down: str) -> tuple[TensorRule, ...]:
    """Return the rules for one tensor per expert and projection, as transformers saves them, or for fused tensors."""
    return (
        _stacked("mlp.experts.gate_up_proj", (gate, up)),
        _stacked("mlp.experts.down_proj", (down,)),
    )


def _stacked(name: str, parts: tuple[str, ...]) -> TensorRule:
    """Return the rule for a parameter with all experts: on disk one tensor per part and expert, or one for all."""
    return TensorRule(
        parameters=(BLOCK + name,),
        layouts=(StorageLayout(names=tuple(BLOCK + part for part in parts)), StorageLayout(names=(BLOCK + name,))),
    )


def block_tensor(
    ours: str, *hf_names: str, layer_condition: Callable[[ModelFields, int], bool] = lambda *_: True
) -> TensorRule:
    """Return the rule for a block's parameter under other names; the first is written."""
    return replace(tensor(BLOCK + ours, *(BLOCK + name for name in hf_names)), layer_condition=layer_condition)


def tensor(ours: str, *hf_names: str, condition: Callable[[ModelFields], bool] = lambda _: True) -> TensorRule:
    """Return the rule for a parameter under other names; the first is written."""
    return TensorRule(
        parameters=(ours,), layouts=tuple(StorageLayout(names=(name,)) for name in hf_names), condition=condition
    )


PER_EXPERT = per_expert(
    "mlp.experts.{expert}.gate_proj.weight",
    "mlp.experts.{expert}.up_proj.weight",
    "mlp.experts.{expert}.down_proj.weight",
)
"""Expert names in most families; Mixtral and GPT-OSS differ."""

"""Components of a family's table. Every entry serves both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from longctx.architecture.fields import ModelFields
from longctx.errors import ConfigError
from longctx.untrusted.reading import shown

HfConfig = Mapping[str, Any]
"""A parsed config.json."""


IGNORED_KEYS = frozenset(
    (
        # Checked by ``config_from_hf`` itself, or read by ``conversion``.
        "architectures", "model_type", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id",
        # Origin of the file, and options of transformers for running it.
        "transformers_version", "_name_or_path", "auto_map", "use_cache", "cache_implementation", "output_attentions",
        "output_hidden_states", "return_dict", "chunk_size_feed_forward", "_attn_implementation_autoset",
        "_attn_implementation", "attn_implementation",
        # From classifiers, which a decoder is not.
        "id2label", "label2id", "problem_type",
    )
)  # fmt: skip
"""Keys of config.json that say nothing about the network of any family."""


START_KEY = "decoder_start_token_id"
"""Of a model that reads a source: what stands before a target's first token."""
TARGET_ID_KEYS = (START_KEY, "forced_bos_token_id", "forced_eos_token_id")
"""Token ids that only such a model's config.json has, read by ``conversion``: the start, and what generation puts first
and last in any case."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Keys of config.json and the fields of ModelFields that they determine."""

    keys: tuple[str, ...] = ()
    """Every key that the rule looks at; a key that no rule of a family names is refused."""
    read: Callable[[HfConfig], dict[str, Any]]
    """Fields of ModelFields; ConfigError where the keys ask for what the decoder cannot do."""
    write: Callable[[ModelFields], dict[str, Any]] = lambda _: {}
    """Keys for this config. Reading them back finds what they cannot say."""


@dataclass(frozen=True, kw_only=True)
class OnDisk:
    """One way to store parameters in files.

    The parameters, concatenated along their first axis, go through ``steps`` (``tensors.STEPS``) and are then flattened
    and cut into the tensors of these names.
    """

    names: tuple[str, ...]
    """``{layer}`` is the layer's number; names with ``{expert}`` are repeated for every expert. None at all: where the
    files leave it out it is zero (read, never written)."""
    steps: tuple[str, ...] = ()
    widths: Callable[[ModelFields], Sequence[int]] | None = None
    """Rows of the tensor of each name; None if they have equal parts."""
    rows: Callable[[ModelFields], Sequence[int]] | None = None
    """For each row of the parameters, laid end to end, its row on disk; None if they lie so."""
    swaps_halves: bool = False
    """Whether the two halves of each row are exchanged on disk."""


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """Parameters with other names or layouts on disk than the decoder's own."""

    parameters: tuple[str, ...]
    layouts: tuple[OnDisk, ...]
    """The first is written, all are read."""
    holds: Callable[[ModelFields], bool] = lambda _: True
    """Whether it is the rule of a model of this config; of several for one parameter the last that holds counts."""
    of_layer: Callable[[ModelFields, int], bool] = lambda *_: True
    """Whether it is the rule of this layer, of parameters that have one."""


@dataclass(frozen=True, kw_only=True)
class MtpOnDisk:
    """Names on disk of a family's blocks for multi-token prediction, which follow the last layer."""

    key: str
    """Key that says how many there are."""
    block: str = "model.layers.{layer}."
    """Beginning of a block's names: ``{layer}`` counts on from the layers, ``{k}`` from 0."""
    others: tuple[str, ...] = (
        "model.layers.{layer}.enorm.weight",
        "model.layers.{layer}.hnorm.weight",
        "model.layers.{layer}.eh_proj.weight",
        "model.layers.{layer}.shared_head.norm.weight",
    )
    """Norms of the embedding and of hidden states, the projection of both, and the norm behind the block."""
    hidden_first: bool = False
    """Whether the projection takes the hidden state before the embedding."""
    copies: tuple[str, ...] = ()
    """Names of the embedding table and of the output matrix, which a block's tensors may have once more."""
    most: int = 64
    """Blocks that files can have."""

    def count(self) -> Rule:
        """Return the rule for the key."""
        key, most = self.key, self.most

        def read(hf: HfConfig) -> dict[str, Any]:
            count = hf.get(key, 0)
            if type(count) is not int or not 0 <= count <= most:
                raise ConfigError(f"{key}={shown(count)} in config.json must lie between 0 and {most}.")
            return {"mtp_layers": count}

        return Rule(keys=(key,), read=read, write=lambda config: {key: config.mtp_layers})

    def tensors(self) -> tuple[TensorRule, ...]:
        """Return the rules for tensors that an ordinary block does not have."""
        rules = [tensor(ours, theirs) for ours, theirs in zip(MTP_PARTS, self.others, strict=True)]
        if self.hidden_first:
            rules[2] = replace(rules[2], layouts=(OnDisk(names=(self.others[2],), swaps_halves=True),))
        return tuple(rules)


MTP_PARTS = tuple(f"model.mtp.{{layer}}.{name}.weight" for name in ("join.enorm", "join.hnorm", "join.eh_proj", "norm"))


@dataclass(frozen=True, kw_only=True)
class Family:
    """Differences of one Hugging Face architecture from the others."""

    model_type: str
    architecture: str
    rules: tuple[Rule, ...]
    other_architectures: tuple[str, ...] = ()
    """Further classes whose folders are read: the same model without a part that is known to be zero, or with a head
    more, by a rule of the key."""
    tensors: tuple[TensorRule, ...] = ()
    """Parameters without a rule have the decoder's names on disk."""
    ignored_keys: frozenset[str] = frozenset()
    """Keys of config.json without a meaning in a decoder, beside ``IGNORED_KEYS``."""
    absent_ids: Mapping[str, int] = field(default_factory=dict)
    """Token ids that transformers' class takes for keys that are absent, where no token of the model says them."""
    ignored_tensors: tuple[str, ...] = (
        r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        r"model\.rotary_emb\.inv_freq",
    )
    """Patterns of whole names: buffers that old versions of transformers saved, here rotary frequencies."""
    other_heads: tuple[str, ...] = ()
    """Patterns of whole names: tensors of heads that the model does not have here; they are left out, and logged."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that a file may have a second time, equal, and whose they are."""
    head: str = "lm_head.weight"
    """The output matrix's name, which a tied model's file may have beside the embeddings."""
    auto_class: str = "AutoModelForCausalLM"
    """By which transformers loads it."""
    mtp: MtpOnDisk | None = None
    """Its blocks for multi-token prediction; those that the decoder does not have are carried."""
    carried_tensors: tuple[str, ...] = ()
    """Patterns of whole names: tensors of parts that the decoder does not have; exports get them as they came."""
    carried_keys: tuple[str, ...] = ()
    """Keys of config.json that describe them; a dot leads into a table. None of them says anything of the decoder."""
    forces_own_tokenizer: bool = False
    """Whether transformers 5 loads the family's own tokenizer class, whatever tokenizer_config.json says."""


# --- storage of routed experts on disk ---

BLOCK = "model.layers.{layer}."
ENCODER_BLOCK = "encoder.layers.{layer}."
"""Of an encoder beside the decoder."""
MLP = BLOCK + "mlp."


def per_expert(gate: str, up: str, down: str) -> tuple[TensorRule, ...]:
    """Return the rules for one tensor per expert and projection, as saved by transformers, or for fused ones."""
    return (
        _stacked("mlp.experts.gate_up_proj", (gate, up)),
        _stacked("mlp.experts.down_proj", (down,)),
    )


def _stacked(name: str, parts: tuple[str, ...]) -> TensorRule:
    """Return the rule for a parameter of all experts: on disk one tensor per part and expert, or one for all."""
    return TensorRule(
        parameters=(BLOCK + name,),
        layouts=(OnDisk(names=tuple(BLOCK + part for part in parts)), OnDisk(names=(BLOCK + name,))),
    )


def renamed(ours: str, *theirs: str, of_layer: Callable[[ModelFields, int], bool] = lambda *_: True) -> TensorRule:
    """Return the rule for a parameter of a block under other names, the first of which is written."""
    return replace(tensor(BLOCK + ours, *(BLOCK + name for name in theirs)), of_layer=of_layer)


def tensor(ours: str, *theirs: str, holds: Callable[[ModelFields], bool] = lambda _: True) -> TensorRule:
    """Return the rule for a parameter under other names, the first of which is written."""
    return TensorRule(parameters=(ours,), layouts=tuple(OnDisk(names=(name,)) for name in theirs), holds=holds)


PER_EXPERT = per_expert(
    "mlp.experts.{expert}.gate_proj.weight",
    "mlp.experts.{expert}.up_proj.weight",
    "mlp.experts.{expert}.down_proj.weight",
)
"""The names that all families but Mixtral and GPT-OSS have."""

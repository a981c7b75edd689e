"""BART and Marian: encoder and decoder, LayerNorm after each sum, one table for both embeddings and the head.

BART learns positions, from the third row of their table on, and applies a norm to the embeddings. Marian uses
sinusoids, all sines before all cosines; only old files contain their table.
"""

from __future__ import annotations

from typing import Any

from longctx.architecture.fields import ModelFields
from longctx.errors import ConfigError
from longctx.families.config_rules import (
    all_heads,
    constant,
    divided_head_dim,
    encoder_decoder_shared,
    integer,
    only,
    same,
    translated,
    typed,
    unsupported_dropout,
)
from longctx.families.llama import DENSE
from longctx.families.spec import (
    BLOCK,
    ENCODER_BLOCK,
    TARGET_ID_KEYS,
    ConfigRule,
    Family,
    HfConfig,
    StorageLayout,
    TensorRule,
    tensor,
)
from longctx.untrusted.strict_json import shown

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "swish": "silu",
    "silu": "silu",
}


def _scaled_embeddings() -> ConfigRule:
    """Return the rule that multiplies embeddings by the square root of the model width."""
    key = "scale_embedding"

    def read(hf: HfConfig) -> dict[str, Any]:
        if typed(key, hf.get(key, False), "bool"):
            return {"embedding_scale": integer(hf, "d_model") ** 0.5}
        return {"embedding_scale": 1.0}

    return ConfigRule(keys=(key,), read=read, write=lambda config: {key: config.embedding_scale != 1})


def _one_table() -> ConfigRule:
    """Return the rule that raises ConfigError unless encoder and decoder share one vocabulary and table (Marian)."""
    key, size = "share_encoder_decoder_embeddings", "decoder_vocab_size"

    def read(hf: HfConfig) -> dict[str, Any]:
        if hf.get(key, True) is not True:
            raise ConfigError(
                f"{key}={shown(hf[key])} is not supported: encoder, decoder and output head share one table here. "
                "Models with true are supported."
            )
        rows = integer(hf, "vocab_size")
        if hf.get(size) not in (None, rows):
            raise ConfigError(
                f"{size}={shown(hf[size])} and vocab_size={rows} in config.json must be equal: encoder and "
                "decoder share one table here."
            )
        return {}

    def write(config: ModelFields) -> dict[str, Any]:
        return {key: True, size: config.vocab_size}

    return ConfigRule(keys=(key, size), read=read, write=write)


_COMMON = (
    DENSE,
    constant(norm="layernorm", norm_order="post", norm_eps=1e-5),
    constant(qkv_bias=True, o_bias=True, ffn_bias=True, head_bias=True, tie_embeddings=True),
    same("vocab_size", "vocab_size"),
    same("d_model", "hidden_size"),
    # In other families this key is the layer count; here it counts encoder layers.
    same("encoder_layers", "encoder_layers", also=("num_hidden_layers",), least=1),
    same("decoder_layers", "num_layers"),
    # Only depth may differ between the stacks: one field here sets both widths.
    encoder_decoder_shared("encoder_attention_heads", "decoder_attention_heads", "num_heads"),
    encoder_decoder_shared("encoder_ffn_dim", "decoder_ffn_dim", "ffn_size"),
    same("max_position_embeddings", "max_positions", default=1024),
    translated("activation_function", "activation", _ACTIVATIONS, default="gelu"),
    same("dropout", "residual_dropout", default=0.1),
    same("init_std", "init_std", default=0.02),
    _scaled_embeddings(),
    divided_head_dim("d_model", "encoder_attention_heads"),
    all_heads("d_model", "encoder_attention_heads"),
    unsupported_dropout("attention_dropout", 0.0),
    unsupported_dropout("activation_dropout", 0.0, target="FFN activations"),
    unsupported_dropout("encoder_layerdrop", 0.0, target="layers"),
    unsupported_dropout("decoder_layerdrop", 0.0, target="layers"),
    only("tie_word_embeddings", True),
    only("is_encoder_decoder", True),
    only("is_decoder", False, written=False),
    # transformers 5 derives every mask's direction from it.
    only("is_causal", None, written=False),
    only("per_layer_config", None, written=False),
    # From releases before 2021, which had other models under these names.
    only("normalize_before", False, written=False),
    only("add_final_layer_norm", False, written=False),
)
_OF_BART = (
    constant(position="learned", position_offset=2, embedding_norm=True),
    only("normalize_embedding", True, written=False),
    only("static_position_embeddings", False, written=False),
)
_OF_MARIAN = (
    _one_table(),
    constant(position="sinusoidal_halves", embedding_norm=False),
    only("normalize_embedding", False, written=False),
    only("static_position_embeddings", True, written=False),
)
# From classifiers, and from releases before 2021.
_IGNORED = frozenset(TARGET_ID_KEYS) | {
    "classifier_dropout",
    "classif_dropout",
    "num_labels",
    "_num_labels",
    "add_bias_logits",
    "extra_pos_embeddings",
    "force_bos_token_to_be_generated",
    "output_past",
}


def _of_stack(block: str, hf_stack: str) -> dict[str, str]:
    """Return a stack's disk names for projections and norms by our names; each has a weight and a bias."""
    attentions = {"self_attn": "self_attn"}
    norms = {"post_attention_layernorm": "self_attn_layer_norm", "post_feedforward_layernorm": "final_layer_norm"}
    if block == BLOCK:
        attentions["cross_attn"] = "encoder_attn"
        norms["cross_layernorm"] = "encoder_attn_layer_norm"
    names = {"mlp.up_proj": "fc1", "mlp.down_proj": "fc2"} | norms
    for ours, hf_attention in attentions.items():
        names |= {f"{ours}.{part}_proj": f"{hf_attention}.{part}_proj" for part in "qkv"}
        names[f"{ours}.o_proj"] = f"{hf_attention}.out_proj"
    return {block + ours: f"{hf_stack}.layers.{{layer}}.{name}" for ours, name in names.items()}


def _named(ours: str, hf_name: str) -> TensorRule:
    """Return the rule for a name in the full model, or in a model saved without its head."""
    return tensor(ours, f"model.{hf_name}", hf_name)


def _tensors() -> tuple[TensorRule, ...]:
    """Return the tensor rules for both families."""
    both = _of_stack(BLOCK, "decoder") | _of_stack(ENCODER_BLOCK, "encoder")
    both |= {"model.embed_norm": "decoder.layernorm_embedding", "encoder.embed_norm": "encoder.layernorm_embedding"}
    rules = [
        _named(f"{ours}.{part}", f"{hf_name}.{part}") for ours, hf_name in both.items() for part in ("weight", "bias")
    ]
    rules.append(_named("model.embed_tokens.weight", "shared.weight"))
    rules.append(_named("model.embed_positions.weight", "decoder.embed_positions.weight"))
    rules.append(_named("encoder.embed_positions.weight", "encoder.embed_positions.weight"))
    # transformers uses zeros if a file has no bias.
    bias = StorageLayout(names=("final_logits_bias",), steps=("one_row",))
    rules.append(TensorRule(parameters=("lm_head.bias",), layouts=(bias, StorageLayout(names=()))))
    return tuple(rules)


_COPIES = {
    f"{prefix}{stack}.embed_tokens.weight": f"{prefix}shared.weight"
    for prefix in ("model.", "")
    for stack in ("encoder", "decoder")
}

BART = Family(
    model_type="bart",
    architecture="BartForConditionalGeneration",
    # The published bart-base and bart-large are saved without a head, because it is the embedding table.
    other_architectures=("BartModel",),
    rules=_COMMON + _OF_BART,
    tensors=_tensors(),
    ignored_keys=_IGNORED,
    default_ids={"decoder_start_token_id": 2, "forced_eos_token_id": 2},
    ignored_tensors=(r"(model\.)?(encoder|decoder)\.version",),
    copies=_COPIES,
    auto_class="AutoModelForSeq2SeqLM",
)
MARIAN = Family(
    model_type="marian",
    architecture="MarianMTModel",
    rules=_COMMON + _OF_MARIAN,
    tensors=_tensors(),
    ignored_keys=_IGNORED | {"save_step"},
    default_ids={"decoder_start_token_id": 58100, "forced_eos_token_id": 0},
    # Sinusoids, which the decoder recomputes.
    ignored_tensors=(r"model\.(encoder|decoder)\.embed_positions\.weight",),
    copies=_COPIES,
    auto_class="AutoModelForSeq2SeqLM",
)

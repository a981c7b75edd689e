"""T5, versions 1.0 and 1.1: encoder and decoder, RMSNorm before each sublayer, a distance bias in each stack.

In 1.0 the head is the embedding table, and logits are scaled; 1.1 has a separate head and a gated FFN.
"""

from __future__ import annotations

from typing import Any

from longctx.architecture.fields import ModelFields
from longctx.architecture.model_rules import GATED
from longctx.errors import ConfigError
from longctx.families.config_rules import constant, integer, only, same, translated, typed
from longctx.families.llama import DENSE
from longctx.families.spec import BLOCK, ENCODER_BLOCK, TARGET_ID_KEYS, ConfigRule, Family, HfConfig, TensorRule, tensor
from longctx.untrusted.strict_json import shown

# In transformers "gated-gelu" is the tanh formula, and "gelu" the exact one.
_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
    "gated-gelu": "geglu_tanh",
    "gated-gelu_new": "geglu_tanh",
    "gated-silu": "swiglu",
}


def _activation_keys() -> ConfigRule:
    """Return the rule that raises ConfigError if newer keys contradict the activation's name."""

    def read(hf: HfConfig) -> dict[str, Any]:
        word = hf.get("feed_forward_proj", "relu")
        _, gated, function = str(word).rpartition("-")
        # As in transformers, the only name with a different function.
        if word == "gated-gelu":
            function = "gelu_new"
        for key, expected in (("is_gated_act", bool(gated)), ("dense_act_fn", function)):
            if hf.get(key, expected) != expected:
                raise ConfigError(
                    f"{key}={shown(hf[key])} in config.json contradicts feed_forward_proj={shown(word)}, which means "
                    f"{expected!r}. Keep one of them."
                )
        return {}

    return ConfigRule(keys=("is_gated_act", "dense_act_fn"), read=read)


def _decoder_layers() -> ConfigRule:
    """Return the rule for the decoder's layer count; null means as many as in the encoder."""
    key = "num_decoder_layers"

    def read(hf: HfConfig) -> dict[str, Any]:
        if hf.get(key) is None:
            return {"num_layers": integer(hf, "num_layers")}
        return {"num_layers": integer(hf, key)}

    return ConfigRule(keys=(key,), read=read, write=lambda config: {key: config.num_layers})


def _head() -> ConfigRule:
    """Return the rule for the head: a tied head has scaled logits, a separate one does not."""
    tied_key, scaled_key = "tie_word_embeddings", "scale_decoder_outputs"

    def read(hf: HfConfig) -> dict[str, Any]:
        # transformers 5 writes tie_word_embeddings as true in both cases, and the scale as a separate key.
        tied = typed(tied_key, hf.get(tied_key, True), "bool")
        scaled = typed(scaled_key, hf.get(scaled_key, tied), "bool")
        if scaled and not tied:
            raise ConfigError(
                f"{scaled_key}=True with {tied_key}=False is not supported: versions of transformers differ in whether "
                f"they scale such logits. Supported: {scaled_key} as {tied_key}, or absent."
            )
        if scaled:
            return {"tie_embeddings": True, "logit_scale": integer(hf, "d_model") ** -0.5}
        return {"tie_embeddings": False, "logit_scale": 1.0}

    return ConfigRule(keys=(tied_key, scaled_key), read=read, write=lambda config: {tied_key: config.tie_embeddings})


_RULES = (
    DENSE,
    # T5 does not scale scores.
    constant(position="t5", qkv_bias=False, attention_scale=1.0),
    same("vocab_size", "vocab_size"),
    same("d_model", "hidden_size"),
    same("num_layers", "encoder_layers", also=("num_hidden_layers",), least=1),
    _decoder_layers(),
    same("num_heads", "num_heads"),
    # T5 has no key for key/value heads.
    ConfigRule(read=lambda hf: {"num_kv_heads": integer(hf, "num_heads")}),
    same("d_kv", "head_dim", default=64),
    same("d_ff", "ffn_size"),
    same("n_positions", "max_positions", default=512),
    same("relative_attention_num_buckets", "relative_buckets", default=32),
    same("relative_attention_max_distance", "relative_max_distance", default=128),
    # transformers also applies it to attention weights and inside the FFN.
    same("dropout_rate", "residual_dropout", default=0.1),
    same("layer_norm_epsilon", "norm_eps", default=1e-6),
    translated("feed_forward_proj", "activation", _ACTIVATIONS, default="relu"),
    _activation_keys(),
    _head(),
    only("is_encoder_decoder", True),
    only("is_decoder", False, written=False),
    # transformers 5 derives every mask's direction from it.
    only("is_causal", None, written=False),
    only("per_layer_config", None, written=False),
)


def _is_gated(config: ModelFields) -> bool:
    return config.activation in GATED


def _of_stack(block: str, hf_stack: str) -> tuple[TensorRule, ...]:
    """Return the rules for a stack's layer tensors; the first layer holds the distance table for all."""
    parts = [("self_attn", "SelfAttention", "input_layernorm")]
    if block == BLOCK:
        parts.append(("cross_attn", "EncDecAttention", "cross_layernorm"))
    rules = []
    for place, (attention, hf_attention, norm) in enumerate(parts):
        at = f"{hf_stack}.block.{{layer}}.layer.{place}"
        for part in "qkvo":
            rules.append(tensor(f"{block}{attention}.{part}_proj.weight", f"{at}.{hf_attention}.{part}.weight"))
        rules.append(tensor(f"{block}{norm}.weight", f"{at}.layer_norm.weight"))
    at = f"{hf_stack}.block.{{layer}}.layer.{len(parts)}"
    ffn = f"{at}.DenseReluDense"
    rules += [
        tensor(f"{block}post_attention_layernorm.weight", f"{at}.layer_norm.weight"),
        tensor(f"{block}mlp.up_proj.weight", f"{ffn}.wi.weight"),
        tensor(f"{block}mlp.gate_proj.weight", f"{ffn}.wi_0.weight"),
        tensor(f"{block}mlp.up_proj.weight", f"{ffn}.wi_1.weight", condition=_is_gated),
        tensor(f"{block}mlp.down_proj.weight", f"{ffn}.wo.weight"),
    ]
    ours = block.partition(".")[0]
    bias = f"{hf_stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    rules.append(tensor(f"{ours}.relative_bias.weight", bias))
    rules.append(tensor(f"{ours}.norm.weight", f"{hf_stack}.final_layer_norm.weight"))
    return tuple(rules)


_ENDS = (
    tensor("model.embed_tokens.weight", "shared.weight"),
    # transformers 5 creates new models without a scale, with the embedding table as head.
    tensor("lm_head.weight", "lm_head.weight", "shared.weight"),
)

T5 = Family(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    rules=_RULES,
    tensors=_ENDS + _of_stack(BLOCK, "decoder") + _of_stack(ENCODER_BLOCK, "encoder"),
    # Weight initialisation, and keys from classifiers and from releases before 2021.
    ignored_keys=frozenset(TARGET_ID_KEYS) | {"initializer_factor", "classifier_dropout", "output_past"},
    # An unused table.
    ignored_tensors=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    copies={f"{stack}.embed_tokens.weight": "shared.weight" for stack in ("encoder", "decoder")},
    auto_class="AutoModelForSeq2SeqLM",
)

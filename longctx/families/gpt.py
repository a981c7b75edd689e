"""GPT-1 and GPT-2: learned positions, LayerNorm, transposed weights, and queries, keys and values in one tensor."""

from __future__ import annotations

from typing import Any

from longctx.architecture.fields import ModelFields
from longctx.errors import ConfigError
from longctx.families.config_rules import (
    UNUSED,
    all_heads,
    constant,
    divided_head_dim,
    integer,
    only,
    same,
    translated,
    typed,
    unsupported_dropout,
)
from longctx.families.llama import DENSE
from longctx.families.spec import BLOCK, ConfigRule, Family, HfConfig, StorageLayout, TensorRule


def _inner() -> ConfigRule:
    """Return the rule for the FFN width; null means four times the model width."""

    def read(hf: HfConfig) -> dict[str, Any]:
        inner = hf.get("n_inner")
        if inner is None:
            return {"ffn_size": 4 * integer(hf, "n_embd")}
        return {"ffn_size": typed("n_inner", inner, "int")}

    def write(config: ModelFields) -> dict[str, Any]:
        # Null for the usual width, as in published files.
        if config.ffn_size == 4 * config.hidden_size:
            return {"n_inner": None}
        return {"n_inner": config.ffn_size}

    return ConfigRule(keys=("n_inner",), read=read, write=write)


def _dropout() -> ConfigRule:
    """Return the rule for one dropout probability on embeddings and residuals."""

    def read(hf: HfConfig) -> dict[str, Any]:
        # 0.1 is transformers' class default, and old files omit it.
        rates = {key: typed(key, hf.get(key, 0.1), "float") for key in ("resid_pdrop", "embd_pdrop")}
        # A single field sets both rates here.
        if len(set(rates.values())) > 1:
            raise ConfigError(f"{rates} is not supported by this decoder; supported: the same for both.")
        return {"residual_dropout": rates["resid_pdrop"]}

    def write(config: ModelFields) -> dict[str, Any]:
        return {"resid_pdrop": config.residual_dropout, "embd_pdrop": config.residual_dropout}

    return ConfigRule(keys=("resid_pdrop", "embd_pdrop"), read=read, write=write)


def _read_context(hf: HfConfig) -> dict[str, Any]:
    """Raise ConfigError if ``n_ctx``, the old name for the context length, has another value."""
    if hf.get("n_ctx", hf.get("n_positions")) != hf.get("n_positions"):
        raise ConfigError(f"n_ctx={hf['n_ctx']} in config.json differs from n_positions={hf.get('n_positions')}.")
    return {}


ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
# In GPT-1, transformers computes "gelu" by its tanh formula.
_ACTIVATIONS_1 = {"gelu": "gelu_tanh", "relu": "relu"}

STACK = (
    *UNUSED,
    DENSE,
    constant(position="learned", qkv_bias=True, o_bias=True, ffn_bias=True),
    same("n_embd", "hidden_size"),
    same("n_layer", "num_layers"),
    same("n_head", "num_heads"),
    same("n_positions", "max_positions"),
    same("layer_norm_epsilon", "norm_eps", default=1e-5),
    same("initializer_range", "init_std", default=0.02),
    divided_head_dim("n_embd", "n_head"),
    all_heads("n_embd", "n_head"),
    _dropout(),
    unsupported_dropout("attn_pdrop"),
    ConfigRule(keys=("n_ctx",), read=_read_context),
)
"""Rules that OpenAI's models share, also Image GPT: all but vocabulary, norms, FFN and head."""

GPT2_OPTIONS = (
    _inner(),
    # Score scales other than head_dim^-½ are not supported.
    only("scale_attn_weights", True),
    only("scale_attn_by_inverse_layer_idx", False),
    only("reorder_and_upcast_attn", False),
    only("add_cross_attention", False, written=False),
)
"""Rules for GPT-2's FFN width and attention options."""

_COMMON = (
    *STACK,
    constant(norm="layernorm"),
    same("vocab_size", "vocab_size"),
    same("tie_word_embeddings", "tie_embeddings", default=True),
)

_OF_OTHER_HEADS = frozenset(
    {
        # From classifiers on top of the decoder.
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
        # From pipelines, and from releases before 2020.
        "task_specific_params",
        "n_special",
        "predict_special_tokens",
        "gradient_checkpointing",
        "output_past",
    }
)


def gpt_tensor(ours: tuple[str, ...], hf_name: str, *, steps: tuple[str, ...] = ()) -> TensorRule:
    """Return the rule for GPT's name, with the full model's prefix, or without it as in old files."""
    names = (f"transformer.{hf_name}", hf_name)
    return TensorRule(parameters=ours, layouts=tuple(StorageLayout(names=(name,), steps=steps) for name in names))


def _projection(*ours: str, hf_name: str) -> tuple[TensorRule, ...]:
    """Return the rules for a weight, stored as [in, out], and its bias."""
    weights = tuple(f"{BLOCK}{name}.weight" for name in ours)
    biases = tuple(f"{BLOCK}{name}.bias" for name in ours)
    # GPT's Conv1D stores its weight as [in, out]; a bias has one axis.
    return (
        gpt_tensor(weights, f"h.{{layer}}.{hf_name}.weight", steps=("transposed",)),
        gpt_tensor(biases, f"h.{{layer}}.{hf_name}.bias"),
    )


def _layer_norm(ours: str, hf_name: str) -> tuple[TensorRule, ...]:
    """Return the rules for a LayerNorm's weight and bias."""
    return (
        gpt_tensor((f"{ours}.weight",), f"{hf_name}.weight"),
        gpt_tensor((f"{ours}.bias",), f"{hf_name}.bias"),
    )


def matrices() -> tuple[TensorRule, ...]:
    """Return the rules for a block's projections."""
    attention = _projection("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", hf_name="attn.c_attn")
    attention += _projection("self_attn.o_proj", hf_name="attn.c_proj")
    ffn = _projection("mlp.up_proj", hf_name="mlp.c_fc") + _projection("mlp.down_proj", hf_name="mlp.c_proj")
    return attention + ffn


def _block_tensors(first_norm: str, second_norm: str) -> tuple[TensorRule, ...]:
    """Return the rules for a block's tensors; the arguments are our norm names for ln_1 and ln_2."""
    norms = _layer_norm(BLOCK + first_norm, "h.{layer}.ln_1") + _layer_norm(BLOCK + second_norm, "h.{layer}.ln_2")
    return matrices() + norms


# Causal masks and positions, which old transformers versions saved as buffers.
BUFFERS = (r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias", r"(transformer\.)?position_ids")

GPT1 = Family(
    model_type="openai-gpt",
    architecture="OpenAIGPTLMHeadModel",
    rules=(
        *_COMMON,
        # GPT-1 applies norms after each sum, GPT-2 before each sublayer.
        constant(norm_order="post"),
        # A different FFN width reads back as this one, so the loss is detected.
        ConfigRule(read=lambda hf: {"ffn_size": 4 * integer(hf, "n_embd")}),
        translated("afn", "activation", _ACTIVATIONS_1, default="gelu"),
    ),
    tensors=(
        gpt_tensor(("model.embed_tokens.weight",), "tokens_embed.weight"),
        gpt_tensor(("model.embed_positions.weight",), "positions_embed.weight"),
        *_block_tensors("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    ignored_keys=_OF_OTHER_HEADS,
    ignored_tensors=BUFFERS,
)

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    rules=(
        *_COMMON,
        *GPT2_OPTIONS,
        translated("activation_function", "activation", ACTIVATIONS, default="gelu_new"),
    ),
    tensors=(
        gpt_tensor(("model.embed_tokens.weight",), "wte.weight"),
        gpt_tensor(("model.embed_positions.weight",), "wpe.weight"),
        *_block_tensors("input_layernorm", "post_attention_layernorm"),
        *_layer_norm("model.norm", "ln_f"),
    ),
    ignored_keys=_OF_OTHER_HEADS,
    ignored_tensors=BUFFERS,
)

"""BERT, RoBERTa and ALBERT with their pretraining heads: bidirectional, learned positions, LayerNorm after each sum.

``ForPreTraining`` has a pair head in addition to the masked-LM head. RoBERTa's positions begin at table row
``pad_token_id`` + 1, and all its tokens belong to one segment. ALBERT's layers share one block, and its tables are
narrower than the model.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    unsupported_dropout,
)
from longctx.families.llama import DENSE
from longctx.families.spec import BLOCK, ConfigRule, Family, HfConfig, TensorRule, tensor

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


def _dropout(default: float) -> tuple[ConfigRule, ...]:
    return (
        unsupported_dropout("attention_probs_dropout_prob", default),
        same("hidden_dropout_prob", "residual_dropout", default=default),
    )


def _pair_head(kind: str, architecture: str) -> ConfigRule:
    """Return the rule for the pair head, which is recognized by the class that saved the folder."""

    def read(hf: HfConfig) -> dict[str, Any]:
        # Keys are the same with and without the head; only the class differs.
        return {"pair_head": kind if hf.get("architectures") == [architecture] else "none"}

    def write(config: ModelFields) -> dict[str, Any]:
        return {"architectures": [architecture]} if config.pair_head == kind else {}

    return ConfigRule(read=read, write=write)


def _offset_positions() -> ConfigRule:
    """Return the rule for positions that begin after the padding id's row, with earlier rows counted (RoBERTa)."""

    def read(hf: HfConfig) -> dict[str, Any]:
        offset, rows = integer(hf, "pad_token_id", 1) + 1, integer(hf, "max_position_embeddings", 512)
        if rows <= offset:
            raise ConfigError(
                f"max_position_embeddings={rows} in config.json leaves no row after the first {offset}, up to "
                f"pad_token_id={offset - 1}."
            )
        return {"position_offset": offset, "max_positions": rows - offset}

    def write(config: ModelFields) -> dict[str, Any]:
        return {
            "pad_token_id": config.position_offset - 1,
            "max_position_embeddings": config.max_positions + config.position_offset,
        }

    return ConfigRule(keys=("pad_token_id", "max_position_embeddings"), read=read, write=write)


_COMMON = (
    *UNUSED,
    DENSE,
    constant(causal=False, position="learned", norm="layernorm", norm_order="post", embedding_norm=True),
    constant(qkv_bias=True, o_bias=True, ffn_bias=True, head_transform=True, head_bias=True, tie_embeddings=True),
    same("vocab_size", "vocab_size"),
    same("hidden_size", "hidden_size"),
    same("num_hidden_layers", "num_layers"),
    same("num_attention_heads", "num_heads"),
    same("intermediate_size", "ffn_size"),
    same("type_vocab_size", "segments", default=2, least=1),
    same("layer_norm_eps", "norm_eps", default=1e-12),
    same("initializer_range", "init_std", default=0.02),
    # If untied, the head has a second bias that is not used.
    only("tie_word_embeddings", True),
    divided_head_dim(),
    all_heads(),
    only("position_embedding_type", "absolute", written=False),
    only("is_decoder", False, written=False),
    # transformers 5 derives the mask's direction from it.
    only("is_causal", None, False, written=False),
    only("add_cross_attention", False, written=False),
)
_OF_OTHER_HEADS = frozenset({"classifier_dropout", "gradient_checkpointing", "pooler_fc_size", "directionality"})


def _tensors(front: str, layers: Mapping[str, str], norms: Mapping[str, str], bias: str) -> tuple[TensorRule, ...]:
    """Return the rules for tables under ``front``, layer and norm weights and biases, and the head's bias."""
    rules = [
        tensor("model.embed_tokens.weight", f"{front}.word_embeddings.weight"),
        tensor("model.embed_positions.weight", f"{front}.position_embeddings.weight"),
        tensor("model.embed_segments.weight", f"{front}.token_type_embeddings.weight"),
        tensor("lm_head.bias", bias),
    ]
    for ours, hf_name in layers.items():
        rules += [tensor(f"{ours}.{part}", f"{hf_name}.{part}") for part in ("weight", "bias")]
    for ours, hf_name in ({"model.embed_norm": f"{front}.LayerNorm"} | dict(norms)).items():
        # Old TensorFlow files use gamma and beta.
        rules.append(tensor(f"{ours}.weight", f"{hf_name}.weight", f"{hf_name}.gamma"))
        rules.append(tensor(f"{ours}.bias", f"{hf_name}.bias", f"{hf_name}.beta"))
    return tuple(rules)


_ATTENTION, _FIRST, _SECOND = (
    f"{BLOCK}self_attn",
    f"{BLOCK}post_attention_layernorm",
    f"{BLOCK}post_feedforward_layernorm",
)
_DENSE, _NORM = "lm_head.transform.dense", "lm_head.transform.norm"


def _of_pairs(dense: str, out: str) -> tuple[TensorRule, ...]:
    """Return the rules for the pair head's two layers, weights and biases."""
    named = {"pair_head.dense": dense, "pair_head.out": out}
    return tuple(tensor(f"{a}.{part}", f"{b}.{part}") for a, b in named.items() for part in ("weight", "bias"))


def _of_bert(prefix: str, *, bias: str, dense: str, norm: str) -> tuple[TensorRule, ...]:
    layer = f"{prefix}.encoder.layer.{{layer}}"
    layers = {
        f"{_ATTENTION}.q_proj": f"{layer}.attention.self.query",
        f"{_ATTENTION}.k_proj": f"{layer}.attention.self.key",
        f"{_ATTENTION}.v_proj": f"{layer}.attention.self.value",
        f"{_ATTENTION}.o_proj": f"{layer}.attention.output.dense",
        f"{BLOCK}mlp.up_proj": f"{layer}.intermediate.dense",
        f"{BLOCK}mlp.down_proj": f"{layer}.output.dense",
        _DENSE: dense,
    }
    norms = {_FIRST: f"{layer}.attention.output.LayerNorm", _SECOND: f"{layer}.output.LayerNorm", _NORM: norm}
    return _tensors(f"{prefix}.embeddings", layers, norms, bias)


def _of_albert() -> tuple[TensorRule, ...]:
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    layers = {
        "model.embed_projection": "albert.encoder.embedding_hidden_mapping_in",
        f"{_ATTENTION}.q_proj": f"{layer}.attention.query",
        f"{_ATTENTION}.k_proj": f"{layer}.attention.key",
        f"{_ATTENTION}.v_proj": f"{layer}.attention.value",
        f"{_ATTENTION}.o_proj": f"{layer}.attention.dense",
        f"{BLOCK}mlp.up_proj": f"{layer}.ffn",
        f"{BLOCK}mlp.down_proj": f"{layer}.ffn_output",
        _DENSE: "predictions.dense",
    }
    norms = {
        _FIRST: f"{layer}.attention.LayerNorm",
        _SECOND: f"{layer}.full_layer_layer_norm",
        _NORM: "predictions.LayerNorm",
    }
    return _tensors("albert.embeddings", layers, norms, "predictions.bias")


def _one_group() -> tuple[ConfigRule, ...]:
    """Return the rules for one block that all layers share."""
    return (
        constant(shared_layers=True),
        translated("hidden_act", "activation", _ACTIVATIONS, default="gelu_new"),
        only("num_hidden_groups", 1),
        only("inner_group_num", 1),
        only("classifier_dropout_prob", 0.1, 0.0, None, written=False),
        same("embedding_size", "embedding_size", default=128),
        same("max_position_embeddings", "max_positions", default=512),
        _pair_head("sop", "AlbertForPreTraining"),
    )


_BERT = (
    translated("hidden_act", "activation", _ACTIVATIONS, default="gelu"),
    same("max_position_embeddings", "max_positions", default=512),
    _pair_head("nsp", "BertForPreTraining"),
)
# RoBERTa's head has this activation for any layer activation.
_ROBERTA = (translated("hidden_act", "activation", {"gelu": "gelu"}, default="gelu"), _offset_positions())

BERT = Family(
    model_type="bert",
    architecture="BertForMaskedLM",
    other_architectures=("BertForPreTraining",),
    rules=_COMMON + _dropout(0.1) + _BERT,
    tensors=_of_bert(
        "bert",
        bias="cls.predictions.bias",
        dense="cls.predictions.transform.dense",
        norm="cls.predictions.transform.LayerNorm",
    )
    + _of_pairs("bert.pooler.dense", "cls.seq_relationship"),
    ignored_keys=_OF_OTHER_HEADS,
    ignored_tensors=(r"bert\.embeddings\.position_ids",),
    other_heads=(r"bert\.pooler\.dense\.(weight|bias)", r"cls\.seq_relationship\.(weight|bias)"),
    copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    head="cls.predictions.decoder.weight",
    auto_class="AutoModelForMaskedLM",
)
ROBERTA = Family(
    model_type="roberta",
    architecture="RobertaForMaskedLM",
    rules=_COMMON + _dropout(0.1) + _ROBERTA,
    tensors=_of_bert("roberta", bias="lm_head.bias", dense="lm_head.dense", norm="lm_head.layer_norm"),
    ignored_keys=_OF_OTHER_HEADS,
    ignored_tensors=(r"roberta\.embeddings\.position_ids",),
    other_heads=(r"roberta\.pooler\.dense\.(weight|bias)",),
    copies={"lm_head.decoder.bias": "lm_head.bias"},
    head="lm_head.decoder.weight",
    auto_class="AutoModelForMaskedLM",
)
ALBERT = Family(
    model_type="albert",
    architecture="AlbertForMaskedLM",
    other_architectures=("AlbertForPreTraining",),
    rules=_COMMON + _dropout(0.0) + _one_group(),
    tensors=_of_albert() + _of_pairs("albert.pooler", "sop_classifier.classifier"),
    ignored_keys=_OF_OTHER_HEADS | {"net_structure_type", "gap_size", "num_memory_blocks", "down_scale_factor"},
    ignored_tensors=(r"albert\.embeddings\.position_ids",),
    other_heads=(r"albert\.pooler\.(weight|bias)", r"sop_classifier\.classifier\.(weight|bias)"),
    copies={"predictions.decoder.bias": "predictions.bias"},
    head="predictions.decoder.weight",
    auto_class="AutoModelForMaskedLM",
)

"""Qwen 2 and 3, dense and with experts, MiMo and Seed-OSS."""

from __future__ import annotations

from longctx.families.config_rules import both_biases, constant, head_dim, kv_heads, llama_like, only, same
from longctx.families.layer_rules import (
    from_layer_on,
    full_attention,
    one_switched_window,
    sparse_steps,
    switched_windows,
)
from longctx.families.llama import DENSE
from longctx.families.rope_rules import rotary
from longctx.families.spec import BLOCK, PER_EXPERT, Family, MtpStorage

_EXPERTS = (
    sparse_steps(),
    same("intermediate_size", "ffn_size"),
    same("num_experts", "num_experts", also=("num_local_experts",), least=1),
    same("num_experts_per_tok", "experts_per_token"),
    same("moe_intermediate_size", "expert_ffn_size"),
    same("norm_topk_prob", "normalize_gates", default=False),
    same("router_aux_loss_coef", "balance_loss_weight", default=0.001),
)

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    rules=llama_like(
        *_EXPERTS,
        kv_heads(),
        head_dim(),
        rotary(),
        one_switched_window(named=True),
        same("qkv_bias", "qkv_bias", default=True),
        same("shared_expert_intermediate_size", "shared_ffn_size", least=1),
    ),
    tensors=PER_EXPERT,
    ignored_keys=frozenset({"output_router_logits"}),
)

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    rules=llama_like(
        DENSE,
        constant(qkv_bias=True),
        kv_heads(),
        head_dim(),
        rotary(),
        switched_windows(from_layer_on),
        same("intermediate_size", "ffn_size"),
        # Positions in three dimensions, for the vision models.
        only("use_mrope", False, written=False),
    ),
    # transformers 5 loads Qwen2Tokenizer here, ignoring tokenizer_config.json.
    forces_own_tokenizer=True,
)

_MIMO_MTP = MtpStorage(
    key="num_nextn_predict_layers",
    block="model.mtp_layers.{k}.",
    others=(
        f"{BLOCK}token_layernorm.weight",
        f"{BLOCK}hidden_layernorm.weight",
        f"{BLOCK}input_proj.weight",
        f"{BLOCK}final_layernorm.weight",
    ),
    hidden_first=True,
)

# MiMo-7B: Qwen2's network with multi-token prediction blocks. transformers has no class for it.
MIMO = Family(
    model_type="mimo",
    architecture="MiMoForCausalLM",
    rules=(*QWEN2.rules, _MIMO_MTP.count()),
    tensors=_MIMO_MTP.tensors(),
    mtp=_MIMO_MTP,
    passthrough_tensors=(r"model\.mtp_layers\..*",),
    passthrough_keys=(_MIMO_MTP.key,),
)

# Qwen2's network, for models with their own tokenizer.
SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    rules=llama_like(
        DENSE,
        kv_heads(),
        head_dim(128),
        rotary(),
        full_attention(),
        same("intermediate_size", "ffn_size"),
        same("attention_bias", "qkv_bias", default=True),
        same("attention_out_bias", "o_bias", default=False),
        same("mlp_bias", "ffn_bias", default=False),
        # transformers' default is 0.1, which this decoder does not support here.
        only("residual_dropout", 0.0, default=0.1),
        only("pretraining_tp", 1),
        no_dropout=only("attention_dropout", 0.0, None, default=0.1),
    ),
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    rules=llama_like(
        DENSE,
        constant(qk_norm="head"),
        kv_heads(),
        head_dim(128),
        rotary(),
        switched_windows(from_layer_on),
        same("intermediate_size", "ffn_size"),
        both_biases(default=False),
    ),
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    rules=llama_like(
        *_EXPERTS,
        constant(qk_norm="head"),
        kv_heads(),
        head_dim(),
        rotary(),
        one_switched_window(),
        both_biases(default=False),
    ),
    tensors=PER_EXPERT,
    ignored_keys=frozenset({"output_router_logits"}),
)

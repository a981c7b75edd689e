"""Mixtral, and MiniMax M2, which uses the same names for its experts."""

from __future__ import annotations

from longctx.families.config_rules import constant, head_dim, kv_heads, llama_like, only, same
from longctx.families.layer_rules import full_attention, one_window
from longctx.families.rope_rules import rotary
from longctx.families.spec import Family, block_tensor, per_expert

_EXPERT = "block_sparse_moe.experts.{expert}."

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    rules=llama_like(
        constant(qkv_bias=False, normalize_gates=True),
        kv_heads(),
        head_dim(),
        rotary(theta=1_000_000.0),
        one_window(default=None),
        same("intermediate_size", "expert_ffn_size"),
        same("num_local_experts", "num_experts", also=("num_experts",), least=1),
        same("num_experts_per_tok", "experts_per_token"),
        same("router_aux_loss_coef", "balance_loss_weight", default=0.001),
        # transformers samples this jitter from its own generator; ours is model.router_jitter.
        only("router_jitter_noise", 0.0),
        eps=1e-5,
    ),
    tensors=(
        block_tensor("mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.gate.weight"),
        # w1 is the gate, w3 up and w2 down.
        *per_expert(_EXPERT + "w1.weight", _EXPERT + "w3.weight", _EXPERT + "w2.weight"),
    ),
    ignored_keys=frozenset({"output_router_logits"}),
)

MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    rules=llama_like(
        constant(qkv_bias=False, qk_norm="full", normalize_gates=True, score_function="sigmoid", selection_bias=True),
        kv_heads(),
        head_dim(128),
        # rotary_dim counts rotary channels per head.
        rotary(theta=5_000_000.0, partial=1.0, size_key="rotary_dim"),
        full_attention(),
        same("intermediate_size", "expert_ffn_size"),
        same("num_local_experts", "num_experts", also=("num_experts",), least=1),
        same("num_experts_per_tok", "experts_per_token"),
        same("router_aux_loss_coef", "balance_loss_weight", default=0.001),
        only("router_jitter_noise", 0.0),
        # Further keys that the released files have for the class.
        only("scoring_func", "sigmoid", written=False),
        only("use_routing_bias", True, written=False),
        only("use_qk_norm", True, written=False),
        only("qk_norm_type", "per_layer", written=False),
        only("shared_intermediate_size", 0, written=False),
    ),
    tensors=(
        block_tensor("mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.gate.weight"),
        block_tensor(
            "mlp.gate.e_score_correction_bias",
            "block_sparse_moe.e_score_correction_bias",
            "mlp.e_score_correction_bias",
        ),
        *per_expert(_EXPERT + "w1.weight", _EXPERT + "w3.weight", _EXPERT + "w2.weight"),
    ),
    ignored_keys=frozenset({"output_router_logits"}),
)

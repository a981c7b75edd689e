"""OLMoE: experts in all layers, norms over full queries and keys."""

from __future__ import annotations

from longctx.families.config_rules import both_biases, constant, divided_head_dim, kv_heads, llama_like, only, same
from longctx.families.layer_rules import full_attention
from longctx.families.rope_rules import rotary
from longctx.families.spec import PER_EXPERT, Family

OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    rules=llama_like(
        constant(qk_norm="full"),
        kv_heads(default_is_heads=True),
        divided_head_dim(),
        rotary(),
        full_attention(),
        both_biases(default=False),
        same("intermediate_size", "expert_ffn_size"),
        same("num_experts", "num_experts", also=("num_local_experts",), least=1),
        same("num_experts_per_tok", "experts_per_token"),
        same("norm_topk_prob", "normalize_gates", default=False),
        same("router_aux_loss_coef", "balance_loss_weight", default=0.01),
        # Would clamp queries, keys and values.
        only("clip_qkv", None),
        eps=1e-5,
    ),
    tensors=PER_EXPERT,
    ignored_keys=frozenset({"output_router_logits"}),
)

"""GLM-4.5 to 4.7: DeepSeek's experts with grouped-query attention and half the channels rotary."""

from __future__ import annotations

from typing import Any

from longctx.architecture.fields import ModelFields
from longctx.families.config_rules import constant, first_of, head_dim, kv_heads, llama_like, same, typed
from longctx.families.deepseek import MTP, SHARED_EXPERTS, shared_experts
from longctx.families.layer_rules import first_dense, full_attention
from longctx.families.rope_rules import rotary
from longctx.families.spec import ConfigRule, Family, HfConfig


def _switched_norm() -> ConfigRule:
    """Return the rule for per-head query and key norms, controlled by a key."""
    key = "use_qk_norm"

    def read(hf: HfConfig) -> dict[str, Any]:
        if typed(key, first_of(hf, (key,), False), "bool"):
            return {"qk_norm": "head"}
        return {"qk_norm": "none"}

    def write(config: ModelFields) -> dict[str, Any]:
        return {key: config.qk_norm == "head"}

    return ConfigRule(keys=(key,), read=read, write=write)


GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    rules=llama_like(
        kv_heads(),
        head_dim(),
        rotary(partial=0.5),
        full_attention(),
        first_dense(1),
        _switched_norm(),
        shared_experts(),
        # Query, key and value biases; the output projection has no bias.
        same("attention_bias", "qkv_bias", default=False),
        same("intermediate_size", "ffn_size"),
        same("moe_intermediate_size", "expert_ffn_size"),
        same("n_routed_experts", "num_experts", also=("num_local_experts", "num_experts"), least=1),
        same("num_experts_per_tok", "experts_per_token"),
        constant(score_function="sigmoid", selection_bias=True),
        same("n_group", "expert_groups", default=1),
        same("topk_group", "groups_per_token", default=1),
        same("norm_topk_prob", "normalize_gates", default=True),
        same("routed_scaling_factor", "routed_scale", default=1.0),
        MTP.count(),
        eps=1e-5,
    ),
    tensors=SHARED_EXPERTS + MTP.tensors(),
    ignored_keys=frozenset({"output_router_logits"}),
    mtp=MTP,
    passthrough_keys=(MTP.key,),
)

"""DeepSeek-V2 and V3: latent attention, expert groups, shared experts, dense first layers."""

from __future__ import annotations

from typing import Any

from longctx.architecture.fields import ModelFields
from longctx.errors import ConfigError
from longctx.families.config_rules import (
    REQUIRED,
    both_biases,
    constant,
    first_of,
    integer,
    kv_heads,
    llama_like,
    only,
    optional,
    same,
    width_of_heads,
)
from longctx.families.layer_rules import first_dense, full_attention
from longctx.families.rope_rules import rotary
from longctx.families.spec import PER_EXPERT, ConfigRule, Family, HfConfig, MtpStorage, block_tensor
from longctx.untrusted.strict_json import shown

# Multi-token prediction blocks follow V3's layers on disk. They are trained if requested; otherwise they are kept from
# import to export.
MTP = MtpStorage(
    key="num_nextn_predict_layers",
    copies=("model.layers.{layer}.embed_tokens.weight", "model.layers.{layer}.shared_head.head.weight"),
)


def _head_sizes() -> ConfigRule:
    """Return the rule for channels without and with rotary positions, which give ``head_dim`` and ``qk_head_dim``."""
    plain, rotary_key = "qk_nope_head_dim", "qk_rope_head_dim"

    def read(hf: HfConfig) -> dict[str, Any]:
        rotary_size = integer(hf, rotary_key)
        # transformers' head_dim is the rotary part, for its rope; ours is the full head.
        sizes = {"head_dim": rotary_size, "qk_head_dim": integer(hf, plain) + rotary_size}
        for key in sizes:
            if hf.get(key, sizes[key]) not in (sizes[key], None):
                raise ConfigError(
                    f"{key}={shown(hf[key])} in config.json contradicts {plain} and {rotary_key}: {sizes[key]}."
                )
        return {"head_dim": sizes["qk_head_dim"], "rope_head_dim": sizes["head_dim"]}

    def write(config: ModelFields) -> dict[str, Any]:
        return {plain: config.head_dim - config.rope_head_dim, rotary_key: config.rope_head_dim}

    return ConfigRule(keys=(plain, rotary_key, "head_dim", "qk_head_dim"), read=read, write=write)


VALUE_SIZE = ConfigRule(
    keys=("v_head_dim",),
    read=lambda hf: {"value_head_dim": integer(hf, "v_head_dim")},
    write=lambda config: {"v_head_dim": config.value_dim},
)
"""Value channels per head."""


def shared_experts(*keys: str, default: Any = REQUIRED) -> ConfigRule:
    """Return the rule for shared experts, merged into one with their total width.

    There is at least one, because transformers always has them. The first of ``keys`` is written; ``default`` is their
    number if no key is present.
    """
    keys = keys or ("n_shared_experts",)

    def read(hf: HfConfig) -> dict[str, Any]:
        count = integer({keys[0]: first_of(hf, keys, default)}, keys[0])
        if count < 1:
            raise ConfigError(f"{keys[0]}={count} in config.json must be at least 1.")
        # Shared experts see the same tokens, so several equal one with their total width.
        return {"shared_ffn_size": count * integer(hf, "moe_intermediate_size"), "shared_gate": False}

    return ConfigRule(keys=keys, read=read, write=lambda c: {keys[0]: c.shared_ffn_size // c.expert_ffn_size})


def _groups_by_method() -> ConfigRule:
    """Return the rule for V2, in which ``topk_method`` enables or disables groups."""
    keys = ("topk_method", "n_group", "topk_group")

    def read(hf: HfConfig) -> dict[str, Any]:
        # Greedy files have n_group and topk_group too, but transformers ignores them.
        method = hf.get("topk_method", "greedy")
        if method == "greedy":
            return {"expert_groups": 1, "groups_per_token": 1}
        if method != "group_limited_greedy":
            raise ConfigError(f"topk_method={shown(method)} is not supported; supported: greedy, group_limited_greedy.")
        return {"expert_groups": integer(hf, "n_group"), "groups_per_token": integer(hf, "topk_group")}

    def write(config: ModelFields) -> dict[str, Any]:
        # Selecting from all groups needs no group limit.
        if config.groups_per_token == config.expert_groups:
            return {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
        sizes = {"n_group": config.expert_groups, "topk_group": config.groups_per_token}
        return {"topk_method": "group_limited_greedy"} | sizes

    return ConfigRule(keys=keys, read=read, write=write)


def _deepseek(*, dense: int, scores: str, q_lora: Any) -> tuple[ConfigRule, ...]:
    """Return the rules shared by V2 and V3."""
    return llama_like(
        kv_heads(default_is_heads=True),
        full_attention(),
        first_dense(dense),
        _head_sizes(),
        VALUE_SIZE,
        shared_experts(),
        same("kv_lora_rank", "kv_lora_rank", least=1),
        optional("q_lora_rank", "q_lora_rank", default=q_lora),
        both_biases(default=False),
        same("intermediate_size", "ffn_size"),
        same("moe_intermediate_size", "expert_ffn_size"),
        same("n_routed_experts", "num_experts", also=("num_local_experts", "num_experts"), least=1),
        same("num_experts_per_tok", "experts_per_token"),
        same("aux_loss_alpha", "balance_loss_weight", default=0.001),
        # The class fixes the scores; a file with another value belongs to another model.
        constant(score_function=scores),
        only("scoring_func", scores),
        only("moe_layer_freq", 1),
        only("mlp_bias", False, written=False),
        only("pretraining_tp", 1, written=False),
    )


SHARED_EXPERTS = (
    *PER_EXPERT,
    block_tensor("mlp.shared_expert.gate_proj.weight", "mlp.shared_experts.gate_proj.weight"),
    block_tensor("mlp.shared_expert.up_proj.weight", "mlp.shared_experts.up_proj.weight"),
    block_tensor("mlp.shared_expert.down_proj.weight", "mlp.shared_experts.down_proj.weight"),
)
# Loss reporting, and the number of ranks over which DeepSeek's own code spreads experts.
_KEYS = frozenset({"output_router_logits", "seq_aux", "ep_size"})

DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    rules=(
        *_deepseek(dense=0, scores="softmax", q_lora=1536),
        width_of_heads("deepseek_v2"),
        _groups_by_method(),
        # transformers 4 omits mscale_all_dim from V2's scores; transformers 5, DeepSeek's own code and this decoder do
        # not.
        rotary(interleaved=True, scales_scores=True),
        constant(normalize_gates=False),
        # transformers ignores it, DeepSeek's own code does not.
        only("norm_topk_prob", False, None),
        same("routed_scaling_factor", "routed_scale", default=1.0),
    ),
    tensors=SHARED_EXPERTS,
    ignored_keys=_KEYS,
)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    rules=(
        *_deepseek(dense=3, scores="sigmoid", q_lora=REQUIRED),
        rotary(interleaved=True, interleaved_key="rope_interleave", scales_scores=True),
        constant(selection_bias=True),
        same("n_group", "expert_groups"),
        same("topk_group", "groups_per_token"),
        only("topk_method", "noaux_tc"),
        same("norm_topk_prob", "normalize_gates", default=True),
        same("routed_scaling_factor", "routed_scale", default=2.5),
        MTP.count(),
    ),
    tensors=SHARED_EXPERTS + MTP.tensors(),
    ignored_keys=_KEYS,
    mtp=MTP,
    passthrough_keys=(MTP.key,),
)

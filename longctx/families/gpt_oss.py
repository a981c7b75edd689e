"""GPT-OSS: sinks, alternating windows, experts with biases, gate and up rows that alternate on disk.

Weights are bfloat16 (or any other plain dtype); the released files' 4-bit blocks (MXFP4) are read as bfloat16.
"""

from __future__ import annotations

from longctx.families.config_rules import SIZES, UNUSED, both_biases, constant, head_dim, kv_heads, only, same
from longctx.families.layer_rules import every_other, windows
from longctx.families.rope_rules import rotary
from longctx.families.spec import MLP, Family, StorageLayout, TensorRule, block_tensor

# transformers' default for a config.json without a rope: the released models' own.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _reordered(name: str, *steps: str) -> TensorRule:
    """Return the rule for a parameter stored under its own name, in another order."""
    return TensorRule(parameters=(MLP + name,), layouts=(StorageLayout(names=(MLP + name,), steps=steps),))


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    rules=(
        *SIZES,
        *UNUSED,
        constant(sinks=True, activation="swiglu_oai", expert_bias=True, router_bias=True, normalize_gates=True),
        kv_heads(),
        head_dim(64),
        rotary(theta=150_000.0, default=_ROPE),
        windows(128, every_other),
        both_biases(default=True),
        same("rms_norm_eps", "norm_eps", default=1e-5),
        same("tie_word_embeddings", "tie_embeddings", default=False),
        same("intermediate_size", "expert_ffn_size"),
        same("num_local_experts", "num_experts", also=("num_experts",), least=1),
        same("num_experts_per_tok", "experts_per_token", also=("experts_per_token",)),
        same("router_aux_loss_coef", "balance_loss_weight", default=0.001),
        # Constants in the activation ``swiglu_oai``.
        only("hidden_act", "silu"),
        only("swiglu_alpha", 1.702),
        only("swiglu_limit", 7.0),
        only("attention_dropout", 0.0, None),
    ),
    tensors=(
        block_tensor("self_attn.sinks.weight", "self_attn.sinks"),
        block_tensor("mlp.gate.weight", "mlp.router.weight"),
        block_tensor("mlp.gate.bias", "mlp.router.bias"),
        _reordered("experts.gate_up_proj", "alternating", "transposed"),
        _reordered("experts.gate_up_proj_bias", "alternating"),
        _reordered("experts.down_proj", "transposed"),
    ),
    ignored_keys=frozenset({"output_router_logits", "initial_context_length"}),
)

"""GPT-OSS: attention sinks, sliding windows in every other layer, experts with biases and a clamped SwiGLU.

The tensor rules describe unquantized files. The released files' MXFP4 blocks are decoded to bfloat16 first
(``conversion.weights.quantized``), and exports are never quantized.
"""

from __future__ import annotations

from longctx.families.config_rules import (
    NO_ATTENTION_DROPOUT,
    SIZES,
    UNUSED,
    both_biases,
    constant,
    head_dim,
    kv_heads,
    only,
    same,
)
from longctx.families.layer_rules import every_other, windows
from longctx.families.rope_rules import rotary
from longctx.families.spec import MLP, Family, StorageLayout, TensorRule, block_tensor

# YaRN from 4,096 to 131,072 tokens: the released models' scaling, and transformers' default if config.json has none.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _same_name(name: str, *steps: str) -> TensorRule:
    """Return the rule for an MLP parameter with the decoder's name on disk, but another layout.

    ``steps`` (``tensor_layouts.LAYOUT_STEPS``) lead from the decoder's layout to the file's, in this order.
    """
    return TensorRule(parameters=(MLP + name,), layouts=(StorageLayout(names=(MLP + name,), steps=steps),))


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    # Not ``llama_like``: hidden_act is silu, as in Llama, but the experts' activation is not SwiGLU.
    rules=(
        *SIZES,
        *UNUSED,
        # A softmax over the selected experts' logits equals one over all logits with the gates rescaled.
        constant(sinks=True, activation="swiglu_oai", expert_bias=True, router_bias=True, normalize_gates=True),
        kv_heads(),
        head_dim(64),
        rotary(theta=150_000.0, default=_YARN),
        windows(128, every_other),
        both_biases(default=True),
        same("rms_norm_eps", "norm_eps", default=1e-5),
        same("tie_word_embeddings", "tie_embeddings", default=False),
        same("intermediate_size", "expert_ffn_size"),
        same("num_local_experts", "num_experts", also=("num_experts",), least=1),
        same("num_experts_per_tok", "experts_per_token", also=("experts_per_token",)),
        same("router_aux_loss_coef", "balance_loss_weight", default=0.001),
        # transformers' experts do not read it: their activation is fixed.
        only("hidden_act", "silu"),
        # Constants in ``swiglu_oai``: gate · sigmoid(alpha · gate) · (up + 1), with gate and up clamped at the limit.
        only("swiglu_alpha", 1.702),
        only("swiglu_limit", 7.0),
        NO_ATTENTION_DROPOUT,
    ),
    tensors=(
        block_tensor("self_attn.sinks.weight", "self_attn.sinks"),
        block_tensor("mlp.gate.weight", "mlp.router.weight"),
        block_tensor("mlp.gate.bias", "mlp.router.bias"),
        # On disk, experts are [E, in, out], and gate and up channels alternate. down_proj_bias is the same in both.
        _same_name("experts.gate_up_proj", "alternating", "transposed"),
        _same_name("experts.gate_up_proj_bias", "alternating"),
        _same_name("experts.down_proj", "transposed"),
    ),
    # initial_context_length repeats the rope's original_max_position_embeddings; transformers does not read it either.
    ignored_keys=frozenset({"output_router_logits", "initial_context_length"}),
)

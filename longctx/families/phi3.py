"""Phi-3 and Phi-4: projections that share their input are one tensor on disk."""

from __future__ import annotations

from longctx.families.config_rules import constant, divided_head_dim, kv_heads, llama_like, only, same
from longctx.families.layer_rules import one_window
from longctx.families.llama import DENSE
from longctx.families.rope_rules import rotary
from longctx.families.spec import BLOCK, Family, StorageLayout, TensorRule


def _joined(name: str, *members: str) -> TensorRule:
    """Return the rule for parameters concatenated in one tensor."""
    return TensorRule(
        parameters=tuple(f"{BLOCK}{member}.weight" for member in members),
        layouts=(StorageLayout(names=(f"{BLOCK}{name}.weight",)),),
    )


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    rules=llama_like(
        DENSE,
        constant(qkv_bias=False),
        kv_heads(default_is_heads=True),
        divided_head_dim(),
        # Its config.json always names the original length.
        rotary(partial=1.0, names_original=True),
        one_window(default=None),
        same("intermediate_size", "ffn_size"),
        only("attention_bias", False, written=False),
        only("resid_pdrop", 0.0),
        only("embd_pdrop", 0.0),
        eps=1e-5,
    ),
    tensors=(
        _joined("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        _joined("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj"),
    ),
)

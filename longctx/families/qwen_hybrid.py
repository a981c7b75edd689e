"""Qwen3-Next and Qwen3.5: three gated delta layers for each softmax attention layer with an output gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from longctx.architecture.fields import ModelFields
from longctx.families.config_rules import both_biases, constant, head_dim, kv_heads, llama_like, only, same
from longctx.families.layer_rules import delta_layers, sparse_steps
from longctx.families.llama import DENSE
from longctx.families.rope_rules import rotary
from longctx.families.spec import (
    BLOCK,
    PER_EXPERT,
    ConfigRule,
    Family,
    MtpStorage,
    StorageLayout,
    TensorRule,
    block_tensor,
)

_OF_IMAGES = frozenset({"mrope_section", "mrope_interleaved"})
"""How three-dimensional positions are spread over rotary channels; in text, all three are the same number."""
_MTP = MtpStorage(
    key="mtp_num_hidden_layers",
    block="mtp.layers.{k}.",
    others=(
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.fc.weight",
        "mtp.norm.weight",
    ),
    most=1,
)


def _mtp_count() -> ConfigRule:
    """Return the rule for the block count, which is written only if there are such blocks."""
    rule = _MTP.count()
    return replace(rule, write=lambda config: rule.write(config) if config.mtp_layers else {})


_HYBRID = llama_like(
    constant(qk_norm="head", norm_offset=True, attention_gate=True),
    kv_heads(),
    head_dim(256),
    rotary(partial=0.25, ignored=_OF_IMAGES),
    # transformers supports only these values; the keys are in released files.
    only("attn_output_gate", True, written=False),
    only("output_gate_type", "swish", written=False),
    only("mamba_ssm_dtype", "float32", written=False),
    delta_layers("gated_delta"),
    both_biases(default=False),
    _mtp_count(),
)
_DENSE = (DENSE, same("intermediate_size", "ffn_size"))
_EXPERTS = (
    same("num_experts", "num_experts", also=("num_local_experts",), least=1),
    same("num_experts_per_tok", "experts_per_token"),
    same("moe_intermediate_size", "expert_ffn_size"),
    same("router_aux_loss_coef", "balance_loss_weight", default=0.001),
    same("shared_expert_intermediate_size", "shared_ffn_size", least=1),
)
_NEXT = (
    sparse_steps(),
    same("intermediate_size", "ffn_size"),
    same("norm_topk_prob", "normalize_gates", default=True),
)
# Without a key: all layers have experts, and gates sum to one.
_ALL_EXPERTS = (constant(normalize_gates=True, dense_layers=()),)


def _gated_heads(config: ModelFields) -> Sequence[int]:
    """Return the disk rows of queries, then of gates: on disk each head has its query, then its gate."""
    D = config.head_dim
    # Part 0 is the query, part 1 the gate.
    return [2 * D * head + part * D + d for part in range(2) for head in range(config.num_heads) for d in range(D)]


def _interleaved(config: ModelFields, widths: Sequence[int]) -> Sequence[int]:
    """Return the disk rows of our parts."""
    # Here each part covers all key heads; on disk each key head has widths rows per part.
    starts = [sum(widths[:n]) for n in range(len(widths))]
    heads = range(config.delta_sizes.key_heads)
    parts = zip(starts, widths, strict=True)
    return [sum(widths) * head + start + n for start, width in parts for head in heads for n in range(width)]


def _projection_rows(config: ModelFields) -> Sequence[int]:
    K, H, D, V, _ = config.delta_sizes
    return _interleaved(config, (D, D, H // K * V, H // K * V))


def _gate_rows(config: ModelFields) -> Sequence[int]:
    K, H = config.delta_sizes[:2]
    return _interleaved(config, (H // K, H // K))


def _of_delta(ours: str, hf_name: str = "") -> TensorRule:
    """Return the rule for a gated delta layer's parameter, by default with the same name on disk."""
    return block_tensor(f"self_attn.{ours}", f"linear_attn.{hf_name or ours}")


def _of_attention(kind: str) -> TensorRule:
    """Return the rule for query and gate weights (or biases), which are one tensor on disk."""
    return TensorRule(
        parameters=(f"{BLOCK}self_attn.q_proj.{kind}", f"{BLOCK}self_attn.gate_proj.{kind}"),
        layouts=(StorageLayout(names=(f"{BLOCK}self_attn.q_proj.{kind}",), rows=_gated_heads),),
    )


# Norms multiply by 1 + weight, except the one inside a gated delta layer.
_SHARED = (
    _of_attention("weight"),
    _of_attention("bias"),
    _of_delta("conv1d.weight"),
    _of_delta("A_log.weight", "A_log"),
    _of_delta("dt_bias.weight", "dt_bias"),
    _of_delta("norm.weight"),
    _of_delta("out_proj.weight"),
)
_SEPARATE_PROJECTIONS = (
    _of_delta("in_proj_qkv.weight"),
    _of_delta("in_proj_z.weight"),
    _of_delta("in_proj_a.weight"),
    _of_delta("in_proj_b.weight"),
)


# Qwen3.5 has four projections, Qwen3-Next two.
def _fused(name: str, members: Sequence[str], rows: Callable[[ModelFields], Sequence[int]]) -> TensorRule:
    """Return the rule for projections that are one tensor on disk, key head by key head."""
    return TensorRule(
        parameters=tuple(f"{BLOCK}self_attn.{member}.weight" for member in members),
        layouts=(StorageLayout(names=(f"{BLOCK}linear_attn.{name}.weight",), rows=rows),),
    )


_FUSED_PROJECTIONS = (
    _fused("in_proj_qkvz", ("in_proj_qkv", "in_proj_z"), _projection_rows),
    _fused("in_proj_ba", ("in_proj_b", "in_proj_a"), _gate_rows),
)

_PASSTHROUGH_TENSORS = (r"mtp\..*",)
_PASSTHROUGH_KEYS = (
    "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "attn_output_gate", "output_gate_type", "mamba_ssm_dtype",
    *(f"rope_parameters.{key}" for key in sorted(_OF_IMAGES)),
)  # fmt: skip

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    rules=_HYBRID + _EXPERTS + _NEXT,
    tensors=_SHARED + _FUSED_PROJECTIONS + PER_EXPERT + _MTP.tensors(),
    ignored_keys=frozenset({"output_router_logits"}),
    passthrough_tensors=_PASSTHROUGH_TENSORS,
    mtp=_MTP,
    passthrough_keys=_PASSTHROUGH_KEYS,
)

QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    rules=_HYBRID + _DENSE,
    tensors=_SHARED + _SEPARATE_PROJECTIONS + _MTP.tensors(),
    passthrough_tensors=_PASSTHROUGH_TENSORS,
    mtp=_MTP,
    passthrough_keys=_PASSTHROUGH_KEYS,
)

QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    rules=_HYBRID + _EXPERTS + _ALL_EXPERTS,
    tensors=_SHARED + _SEPARATE_PROJECTIONS + PER_EXPERT + _MTP.tensors(),
    # All layers have experts, so keys about dense layers are ignored.
    ignored_keys=frozenset({"output_router_logits", "intermediate_size", "mlp_only_layers"}),
    passthrough_tensors=_PASSTHROUGH_TENSORS,
    mtp=_MTP,
    passthrough_keys=_PASSTHROUGH_KEYS,
)

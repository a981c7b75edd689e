"""Tiny random models made by transformers, one or more a family, with choices that tell their parts apart."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longctx.config import ModelConfig
from longctx.conversion import load_hf
from longctx.conversion.tensor_layouts import LAYOUT_STEPS, tensor_specs
from longctx.families import FAMILIES
from longctx.model.decoder import Decoder

_SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "norm_topk_prob": True}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
}  # fmt: skip
_MSCALED = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "mscale": 0.8, "mscale_all_dim": 0.7, "beta_fast": 2.0, "beta_slow": 1.0,
}  # fmt: skip


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **values}}


@dataclass(frozen=True)
class Case:
    """A transformers config, and what its class is called."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    std: float = 0.2
    """Of its weights."""
    sizes: dict[str, Any] = field(default_factory=lambda: _SIZES)
    auto_class: str = "AutoModelForCausalLM"

    def config(self) -> Any:
        import transformers

        return getattr(transformers, f"{self.name}Config")(**self.sizes | self.values)

    def config_json(self) -> dict[str, Any]:
        """Its config.json, without what only transformers adds."""
        return json.loads(self.config().to_json_string(use_diff=False)) | {"architectures": None}


_GLM = {
    "moe_intermediate_size": 12, "num_experts_per_tok": 3, "n_routed_experts": 6, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "num_mtp_layers": 0,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
CASES = {
    "llama": Case("Llama"),
    "llama with biases": Case("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama linear": Case("Llama", _rope("linear", factor=3.0)),
    "llama dynamic": Case("Llama", {"max_position_embeddings": 16} | _rope("dynamic", factor=2.0)),
    "llama yarn": Case("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=2.0)),
    "llama yarn untruncated": Case(
        "Llama",
        _rope("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False, attention_factor=0.9),
    ),
    "llama yarn mscale": Case("Llama", {"rope_parameters": _MSCALED}),
    "llama longrope": Case(
        "Llama",
        _rope(
            "longrope", short_factor=[1.0, 1.1, 1.3, 2.0], long_factor=[1.0, 2.0, 3.5, 4.0], factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "llama longrope short": Case(
        "Llama",
        _rope(
            "longrope", short_factor=[1.0, 1.1, 1.3, 2.0], long_factor=[1.0, 2.0, 3.5, 4.0],
            original_max_position_embeddings=48,
        ),
    ),
    "llama llama3": Case(
        "Llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "mistral": Case("Mistral", {"sliding_window": 7, "head_dim": 12}),
    "ministral3": Case(
        "Ministral3",
        {"head_dim": 12}
        | _rope(
            "yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=2.0, mscale=1.0, mscale_all_dim=1.0,
            llama_4_scaling_beta=0.3,
        ),
    ),
    "mistral full": Case("Mistral", {"sliding_window": None}),
    "qwen2": Case("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2 full": Case("Qwen2", {"tie_word_embeddings": True}),
    "seed_oss": Case(
        "SeedOss", {"head_dim": 12, "attention_dropout": 0.0, "residual_dropout": 0.0, "attention_out_bias": True}
    ),
    "qwen2_moe": Case("Qwen2Moe", _MOE | {"shared_expert_intermediate_size": 20, "mlp_only_layers": [1]}),
    "qwen2_moe window": Case(
        "Qwen2Moe",
        _MOE
        | {"shared_expert_intermediate_size": 20, "decoder_sparse_step": 2, "use_sliding_window": True}
        | {"sliding_window": 6, "layer_types": ["sliding_attention"] * 3},
    ),
    "qwen3": Case("Qwen3", {"head_dim": 12, "attention_bias": True, "layer_types": None}),
    "qwen3 window": Case(
        "Qwen3", {"head_dim": 12, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
    ),
    "qwen3_moe": Case("Qwen3Moe", _MOE | {"head_dim": 12, "decoder_sparse_step": 2}),
    "qwen3_moe window": Case(
        "Qwen3Moe", _MOE | {"norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 6}
    ),
    "qwen3_next": Case(
        "Qwen3Next",
        _MOE | _DELTA | {"head_dim": 16, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1]},
        std=0.1,
    ),
    "qwen3_next biases": Case(
        "Qwen3Next",
        _MOE
        | _DELTA
        | {"head_dim": 8, "shared_expert_intermediate_size": 20, "attention_bias": True, "norm_topk_prob": False}
        | {"linear_num_value_heads": 2, "layer_types": ["full_attention", "linear_attention", "full_attention"]},
        std=0.1,
    ),
    "qwen3_5_text": Case("Qwen3_5Text", _DELTA | {"head_dim": 16, "tie_word_embeddings": True}, std=0.1),
    "qwen3_5_moe_text": Case(
        "Qwen3_5MoeText",
        {key: value for key, value in _MOE.items() if key != "norm_topk_prob"}
        | _DELTA
        | {"head_dim": 16, "shared_expert_intermediate_size": 20},
    ),
    "smollm3": Case("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "smollm3 biases": Case(
        "SmolLM3", {"no_rope_layers": [0, 1, 1], "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    ),
    "granite": Case(
        "Granite",
        {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
        | {"attention_multiplier": 0.2, "attention_bias": True},
    ),
    "phi3": Case("Phi3", {"sliding_window": 7, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "phi3 partial": Case(
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "olmo2": Case("Olmo2", {"num_key_value_heads": 4}),
    "olmo3": Case("Olmo3", {"sliding_window": 6, "num_hidden_layers": 4}),
    "glm4_moe": Case(
        "Glm4Moe",
        _GLM | {"head_dim": 12, "use_qk_norm": True, "attention_bias": True, "n_group": 2, "topk_group": 1},
    ),
    "glm4_moe plain": Case("Glm4Moe", _GLM | {"head_dim": 8, "routed_scaling_factor": 1.5, "norm_topk_prob": False}),
    "minimax_m2": Case(
        "MiniMaxM2", {"head_dim": 12, "num_local_experts": 5, "num_experts_per_tok": 2, "rotary_dim": 6}
    ),
    "mixtral": Case("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral window": Case("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 6}),
    "olmoe": Case("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe normalised": Case(
        "Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "attention_bias": True}
    ),
    "gemma2": Case(
        "Gemma2",
        {"head_dim": 12, "sliding_window": 6, "query_pre_attn_scalar": 19, "attn_logit_softcapping": 2.0}
        | {"final_logit_softcapping": 8.0},
    ),
    "gemma4_text": Case(
        "Gemma4Text",
        {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 7,
            "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4_text, other values": Case(
        "Gemma4Text",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 7,
            "head_dim": 8, "global_head_dim": 12, "hidden_size_per_layer_input": 0,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "granitemoehybrid": Case(
        "GraniteMoeHybrid",
        {
            "layer_types": ["linear_attention", "linear_attention", "full_attention"], "mamba_n_heads": 8,
            "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "num_local_experts": 0,
            "shared_intermediate_size": 40, "embedding_multiplier": 2.0, "residual_multiplier": 0.7,
            "logits_scaling": 3.0, "attention_multiplier": 0.2,
        },
    ),
    "granitemoehybrid, experts": Case(
        "GraniteMoeHybrid",
        {
            "layer_types": ["full_attention", "linear_attention", "linear_attention"], "mamba_n_heads": 4,
            "mamba_d_head": 16, "mamba_d_state": 5, "num_local_experts": 6,
            "num_experts_per_tok": 2, "shared_intermediate_size": 24, "intermediate_size": 20,
            "position_embedding_type": "rope",
        },
    ),
    "gemma3_text": Case(
        "Gemma3Text",
        {"head_dim": 12, "sliding_window": 6, "query_pre_attn_scalar": 19, "sliding_window_pattern": 3}
        | {"num_hidden_layers": 4, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        }},
        std=0.12,
    ),
    "gpt2": Case(
        "GPT2",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 97, "n_inner": 52}
        | {"resid_pdrop": 0.1, "bos_token_id": None, "eos_token_id": None},
        sizes={},
    ),
    "gpt2 untied": Case(
        "GPT2",
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 97, "tie_word_embeddings": False}
        | {"activation_function": "gelu", "bos_token_id": None, "eos_token_id": None},
        sizes={},
    ),
    "openai-gpt": Case(
        "OpenAIGPT",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 97}
        | {"bos_token_id": None, "eos_token_id": None},
        sizes={},
    ),
    "imagegpt": Case(
        "ImageGPT",
        {"n_embd": 36, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 97, "n_inner": 50},
        sizes={},
        auto_class="ImageGPTForCausalImageModeling",
    ),
    "deepseek_v2": Case("DeepseekV2", _LATENT | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7}),
    "deepseek_v2 lite": Case(
        "DeepseekV2", _LATENT | {"q_lora_rank": None, "first_k_dense_replace": 0, "rope_parameters": _MSCALED}
    ),
    "deepseek_v3": Case("DeepseekV3", _LATENT | {"rope_parameters": _MSCALED, "attention_bias": True}),
    "deepseek_v3 halves": Case(
        "DeepseekV3",
        _LATENT | {"rope_interleave": False, "norm_topk_prob": False, "first_k_dense_replace": 2, "q_lora_rank": None},
    ),
    "kimi_linear": Case(
        "KimiLinear",
        {key: value for key, value in _LATENT.items() if key not in ("n_group", "topk_group", "n_routed_experts")}
        | {"q_lora_rank": None, "num_experts": 8, "n_group": 4, "topk_group": 2, "linear_num_heads": 3}
        | {"linear_head_dim": 6, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        std=0.1,
    ),
    "olmo_hybrid": Case("OlmoHybrid", _DELTA | {"rms_norm_eps": 1e-6}, std=0.1),
    "olmo_hybrid rotary": Case(
        "OlmoHybrid",
        _DELTA
        | {"linear_allow_neg_eigval": False, "linear_num_value_heads": 2, "num_hidden_layers": 4, "layer_types": None}
        | _rope("default"),
        std=0.1,
    ),
    "gpt_oss": Case(
        "GptOss",
        {"head_dim": 12, "sliding_window": 6, "num_local_experts": 5, "num_experts_per_tok": 2}
        | {"rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 16,
        }},
    ),
}  # fmt: skip


_ENCODER_SIZES = {
    "vocab_size": 97, "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 50,
    "max_position_embeddings": 41, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def _encoder(name: str, **values: Any) -> Case:
    return Case(name, values, 0.3, _ENCODER_SIZES, "AutoModelForMaskedLM")


ENCODERS = {
    "bert": _encoder("Bert", pad_token_id=0, hidden_act="gelu"),
    "bert, three segments": _encoder("Bert", type_vocab_size=3, hidden_act="relu"),
    "bert, another gelu": _encoder("Bert", hidden_act="gelu_new"),
    "roberta": _encoder("Roberta", pad_token_id=1, type_vocab_size=1, layer_norm_eps=1e-5),
    "roberta, another padding": _encoder("Roberta", pad_token_id=4, type_vocab_size=2),
    "albert": _encoder("Albert", embedding_size=20, pad_token_id=0, hidden_act="gelu_new"),
    "albert, as wide": _encoder("Albert", embedding_size=36, pad_token_id=0, hidden_act="relu"),
}


_BART_SIZES = {
    "vocab_size": 97, "d_model": 36, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 50, "decoder_ffn_dim": 50, "max_position_embeddings": 41,
    "pad_token_id": 96,
}  # fmt: skip
_T5_SIZES = {
    "vocab_size": 97, "d_model": 36, "d_kv": 7, "d_ff": 50, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 5,
    "decoder_start_token_id": 0,
}  # fmt: skip


def _two_stacks(name: str, sizes: dict[str, Any], **values: Any) -> Case:
    return Case(name, values, 0.3, sizes, "AutoModelForSeq2SeqLM")


TWO_STACKS = {
    "bart": _two_stacks("Bart", _BART_SIZES),
    "bart, scaled": _two_stacks("Bart", _BART_SIZES, scale_embedding=True, activation_function="relu"),
    "marian": _two_stacks(
        "Marian",
        _BART_SIZES,
        scale_embedding=True,
        activation_function="swish",
        decoder_start_token_id=96,
    ),
    "marian, not scaled": _two_stacks("Marian", _BART_SIZES, activation_function="gelu", decoder_start_token_id=95),
    "t5": _two_stacks("T5", _T5_SIZES),
    "t5, few buckets": _two_stacks(
        "T5", _T5_SIZES, relative_attention_num_buckets=6, relative_attention_max_distance=9, num_decoder_layers=4
    ),
    "t5, version 1.1": _two_stacks("T5", _T5_SIZES, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "t5, gated by silu": _two_stacks("T5", _T5_SIZES, feed_forward_proj="gated-silu"),
}
"""Those with an encoder beside the decoder."""
_VIT_SIZES = {
    "hidden_size": 30, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 50,
    "image_size": [12, 20], "patch_size": 4, "num_labels": 7,
}  # fmt: skip
_SWIN_SIZES = {
    "image_size": [24, 48], "patch_size": 2, "embed_dim": 8, "depths": [2, 3], "num_heads": [2, 4], "window_size": 3,
    "mlp_ratio": 2.5, "drop_path_rate": 0.0, "num_labels": 7,
}  # fmt: skip
_IMAGE_GPT_SIZES = {"n_embd": 36, "n_layer": 3, "n_head": 4, "n_positions": 36, "vocab_size": 13, "n_inner": 50}


def _vision(name: str, sizes: dict[str, Any], *, auto_class: str = "AutoModelForImageClassification", **values: Any):
    return Case(name, values, 0.3, sizes, auto_class)


VISION = {
    "vit": _vision("ViT", _VIT_SIZES),
    "vit, gray": _vision("ViT", _VIT_SIZES, num_channels=1, qkv_bias=False, hidden_act="gelu_new", image_size=12),
    "vit, no head": _vision("ViT", _VIT_SIZES, auto_class="AutoModel"),
    "swin": _vision("Swin", _SWIN_SIZES),
    "swin, one stage": _vision("Swin", _SWIN_SIZES, depths=[3], num_heads=[4], qkv_bias=False, num_channels=1),
    "swin, no head": _vision("Swin", _SWIN_SIZES, auto_class="AutoModel"),
    "imagegpt, classes": _vision("ImageGPT", _IMAGE_GPT_SIZES, num_labels=5),
}
"""Those that read images, most with a class head."""
WITH_CLASS = tuple(name for name in FAMILIES if name != "mimo")
"""Families that transformers has a class of; MiMo's is its makers' own, which ``mtp_models`` builds."""


def new_model(auto_class: str, config: Any) -> Any:
    """A model of transformers' class, with weights as it starts."""
    import transformers

    chosen = getattr(transformers, auto_class)
    # A class of its own, if no Auto class has the model.
    if not auto_class.startswith("Auto"):
        return chosen(config)
    return chosen.from_config(config)


def build(case: Case, *, seed: int = 0) -> Any:
    """The model in float32, in evaluation, every tensor far from where it starts; attention by definition."""
    config = case.config()
    config._attn_implementation = "eager"
    model = new_model(case.auto_class, config).eval()
    # transformers 5 ties all that it makes, and leaves apart what it reads so.
    if case.values.get("feed_forward_proj") == "gated-gelu":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            # Marian's sinusoids.
            if not tensor.requires_grad:
                continue
            # The norms of the first two add 1.
            is_norm = "norm" in name.lower() or ".ln_" in name
            is_factor = is_norm and not case.name.startswith(("Gemma2", "Gemma3"))
            around = 1.0 if is_factor and name.endswith("weight") else 0.0
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * case.std + around)
        for name, tensor in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "final_logits_bias")):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
            if name.endswith("layer_scalar"):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2 + 1)
    return model


def in_float64(model: Any) -> Any:
    """A copy of a model whose weights and rotary frequencies are float64."""
    copied = copy.deepcopy(model).double()
    copied.set_experts_implementation("eager")
    rotary = getattr(copied.model, "rotary_emb", None)
    if rotary is None:
        return copied
    channels = 2 * len(rotary.inv_freq)
    theta = copied.config.rope_parameters["rope_theta"]
    rotary.inv_freq = theta ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    return copied


@contextmanager
def computing_in(dtype: torch.dtype, model: Any) -> Iterator[None]:
    """Within the block a float64 model computes in float64 where its code asks for float32."""
    if dtype != torch.float64:
        yield
        return

    class Doubled:
        float32 = float = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    module = sys.modules[type(model).__module__]
    with mock.patch.object(module, "torch", Doubled()), mock.patch.object(Tensor, "float", Tensor.double):
        yield


def save(model: Any, folder: Path) -> Path:
    """The folder that transformers makes of it, in small shards."""
    model.save_pretrained(folder, max_shard_size="60KB")
    return folder


def ours(folder: Path) -> Decoder:
    """The folder as our decoder."""
    config, tensors = load_hf(folder)
    model = Decoder(config, seed=None)
    model.load_state_dict(tensors)
    return model.eval()


def on_disk(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def gradients_by_our_names(model: Any, folder: Path) -> dict[str, Tensor]:
    """A transformers model's gradients, through the table of its family as its weights would go."""
    folder.mkdir()
    # A file of weights has no float64.
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    found |= {
        name: torch.zeros_like(b).float()
        for name, b in model.named_buffers()
        if name.endswith(("correction_bias", "layer_scalar"))
    }
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / "model.safetensors")
    model.config.save_pretrained(folder)
    return load_hf(folder)[1]


def gradients_in_float64(model: Any, config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """A float64 model's gradients through the tensor rules of its family, without a file of ours."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    # Only a folder has the names of files: transformers 5 has others in memory.
    model.save_pretrained(folder)
    by_name, found = on_disk(folder), {}
    for spec in tensor_specs(config, model_type=model.config.model_type):
        layout = spec.layouts[0]
        whole = by_name[layout.parts[0].name]
        for step in layout.steps:
            whole = LAYOUT_STEPS[step].disk_view(whole)
        found[spec.name] = whole[slice(*layout.rows)] if layout.is_shared else whole
    return found


def tokens_of(config: ModelConfig, *, rows: int = 2, length: int = 40, seed: int = 1) -> Tensor:
    """Random tokens [rows, length] that the model can predict, after a first one that it perhaps cannot."""
    tokens = torch.randint(config.head_rows, (rows, length), generator=torch.Generator().manual_seed(seed))
    if config.output_vocab_size:
        tokens[:, 0] = config.vocab_size - 1
    return tokens

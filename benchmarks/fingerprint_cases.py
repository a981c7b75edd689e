"""The cases of ``fingerprint.py`` as plain values: models by feature, training runs, masks, families."""

from __future__ import annotations

from typing import Any

Settings = dict[str, Any]

OLD_NAMES = {"communication_dtype": "gradient_wire"}
"""Keys of ``parallel`` that earlier states call otherwise."""

BASE: Settings = {
    "vocab_size": 512,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_positions": 512,
    "ffn_size": 48,
    "num_experts": 0,
    "init_std": 0.1,
}
"""A model that trains a step in milliseconds; the weights are large enough for every part to matter."""

EXPERTS: Settings = {
    "num_experts": 8,
    "experts_per_token": 2,
    "expert_ffn_size": 16,
    "shared_ffn_size": 24,
    "balance_loss_weight": 0.01,
}
_YARN: Settings = {"kind": "yarn", "factor": 4.0, "original_max_positions": 64}
_LATENT: Settings = {
    "num_kv_heads": 4,
    "head_dim": 12,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "rope_head_dim": 4,
    "value_head_dim": 8,
}
_GEMMA: Settings = {
    "norm_order": "sandwich",
    "norm_offset": True,
    "activation": "geglu_tanh",
    "embedding_scale": 32**0.5,
    "attention_scale": 0.25,
    "attention_softcap": 3.0,
    "logit_softcap": 8.0,
    "layers": ["window", "full"],
    "window": 24,
    "local_rope_theta": 500.0,
    "qkv_bias": False,
}
_GPT_OSS: Settings = {
    **EXPERTS,
    "shared_ffn_size": 0,
    "layers": ["window", "full"],
    "window": 24,
    "sinks": True,
    "activation": "swiglu_oai",
    "o_bias": True,
    "router_bias": True,
    "expert_bias": True,
    "rope": {**_YARN, "truncate": False},
}
_DEEPSEEK: Settings = {
    **_LATENT,
    **EXPERTS,
    "num_layers": 3,
    "rope": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "interleaved": True},
    "shared_gate": False,
    "dense_layers": [0],
    "score_function": "sigmoid",
    "selection_bias": True,
    "expert_groups": 4,
    "groups_per_token": 2,
    "routed_scale": 2.5,
    "tie_embeddings": False,
}
_GPT2: Settings = {
    "num_kv_heads": 4,
    "position": "learned",
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "ffn_bias": True,
    "o_bias": True,
}
_LONGROPE: Settings = {
    "kind": "longrope",
    "factor": 4.0,
    "original_max_positions": 32,
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [1.0, 2.0, 3.5, 4.0],
}

MODELS: dict[str, Settings] = {
    "dense": {},
    "gpt2": _GPT2,
    "post-norm": {
        "norm_order": "post",
        "position": "sinusoidal",
        "activation": "relu2",
        "residual_scale": 0.7,
        "logit_scale": 0.5,
        "tie_embeddings": False,
    },
    "qwen3": {"qk_norm": "head", "qkv_bias": False, "tie_embeddings": False, "rope": {"kind": "linear", "factor": 2.0}},
    "gemma": _GEMMA,
    "gpt-oss": _GPT_OSS,
    "latent": {**_LATENT, "q_lora_rank": 0, "rope": {"interleaved": True}},
    "deepseek": _DEEPSEEK,
    "sparse-linear": {
        "layers": ["sparse", "linear"],
        "window": 16,
        "sparse_stride": 24,
        "rope_layers": [True, False],
    },
    "alibi": {"position": "alibi"},
    "t5": {"position": "t5", "relative_buckets": 8, "relative_max_distance": 32},
    "relative": {"position": "relative"},
    "no-position": {"position": "none", "activation": "relu"},
    "ntk": {"rope": {"kind": "ntk", "factor": 4.0, "partial": 0.5}},
    "dynamic": {"rope": {"kind": "dynamic", "factor": 2.0, "original_max_positions": 16}},
    "longrope": {"rope": _LONGROPE},
    "llama3": {"rope": {"kind": "llama3", "factor": 8.0, "original_max_positions": 32}},
    "experts": EXPERTS,
    "olmoe": {**EXPERTS, "shared_ffn_size": 0, "qk_norm": "full", "normalize_gates": False, "expert_groups": 2},
}
"""What each model has beside ``BASE``."""

QUICK_MODELS = ("dense", "gemma", "gpt-oss", "deepseek", "sparse-linear", "t5", "experts")

TRAINING: Settings = {
    "run": {"seed": 3, "hostfile": "none", "device": "cpu", "timeout_seconds": 120.0},
    "data": {"seq_len": 256},
    "train": {
        "steps": 3,
        "tokens_per_step": 1024,
        "micro_batch_rows": 1,
        "dtype": "float32",
        "lr": 5e-3,
        "warmup_steps": 1,
        "final_lr_ratio": 0.05,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "clip_norm": 1.0,
        "keep": "all",
        "store": "device",
        "recompute_experts": "activation",
    },
    "parallel": {
        "context": 2,
        "ulysses": 1,
        "expert": 1,
        "expert_tile_tokens": 0,
        "layout": "zigzag",
        "transport": "p2p",
        "kernel": "auto",
    },
    "zero": {"stage": 1},
    "checkpoint": {"every_steps": 2, "keep_last": 1},
    "validation": {"every_steps": 2, "rows": 3},
}
"""What all runs have in common; nothing that matters is left to a default."""

_JITTERED: Settings = {"router_jitter": 0.02, "residual_dropout": 0.1, "router_z_loss_weight": 1e-3}

RUNS: dict[str, Settings] = {
    "zero0-data": {
        "model": {},
        "parallel": {"context": 1, "layout": "contiguous"},
        "zero": {"stage": 0},
        "train": {"clip_norm": 0.0, "beta2": 0.99},
    },
    "zero1-zigzag": {
        "model": {},
        "train": {"micro_batch_rows": 2, "z_loss": 1e-3, "label_smoothing": 0.1},
    },
    "zero2-striped-bfloat16": {
        "model": MODELS["qwen3"],
        "parallel": {"layout": "striped", "transport": "all_gather", "communication_dtype": "bfloat16"},
        "zero": {"stage": 2},
        "train": {"dtype": "bfloat16"},
    },
    "zero3-balanced-gpt2": {
        "model": {**_GPT2, "residual_dropout": 0.1},
        "parallel": {"layout": "balanced", "transport": "two_level", "deterministic": True},
        "zero": {"stage": 3},
        "train": {"keep": "attention"},
        "local_size": 1,
    },
    "experts-sequence": {
        "model": {**EXPERTS, **_JITTERED, "balance_scope": "sequence"},
        "parallel": {"layout": "balanced"},
        "train": {"recompute_experts": "none"},
    },
    "experts-expert2-micro-batch": {
        "model": {**_DEEPSEEK, "balance_scope": "micro_batch", "selection_bias_rate": 1e-2},
        "parallel": {"context": 1, "expert": 2, "expert_tile_tokens": 96},
        "zero": {"stage": 2},
        "train": {"recompute_experts": "all", "record_routing": "{folder}/routing"},
    },
    "experts-expert2-zero3-drop": {
        "model": {**EXPERTS, **_JITTERED, "balance_scope": "global_batch", "capacity_factor": 1.1},
        "parallel": {"expert": 2, "layout": "striped"},
        "zero": {"stage": 3},
        "train": {"keep": "attention"},
    },
    "experts-pad-bfloat16": {
        "model": {**EXPERTS, "capacity_factor": 1.25, "dense_layers": [0]},
        "parallel": {"layout": "contiguous", "transport": "all_gather"},
        "train": {"dtype": "bfloat16", "micro_batch_rows": 2},
    },
    "sinks-ulysses2": {
        "model": _GPT_OSS,
        "parallel": {"ulysses": 2, "expert": 2},
        "train": {"keep": "attention"},
    },
    "sparse-linear": {"model": MODELS["sparse-linear"]},
    "latent-contiguous": {
        "model": MODELS["latent"],
        "parallel": {"layout": "contiguous"},
        "train": {"keep": "attention"},
    },
    "gemma-balanced": {
        "model": {**_GEMMA, "local_rope_theta": 0.0},
        "parallel": {"layout": "balanced"},
        "train": {"micro_batch_rows": 2},
    },
    "alibi-ulysses2": {"model": MODELS["alibi"], "parallel": {"ulysses": 2}, "zero": {"stage": 3}},
    "t5-striped": {"model": MODELS["t5"], "parallel": {"layout": "striped"}},
    "relative-blockwise": {"model": MODELS["relative"], "parallel": {"kernel": "blockwise"}},
    "post-norm-bfloat16": {"model": MODELS["post-norm"], "train": {"dtype": "bfloat16"}, "zero": {"stage": 3}},
    "four-ranks": {
        "model": {**EXPERTS, "balance_scope": "global_batch"},
        "parallel": {"context": 4, "ulysses": 2, "expert": 4, "layout": "balanced"},
        "ranks": 4,
    },
    "four-ranks-data": {
        "model": {**EXPERTS, "balance_scope": "micro_batch"},
        "parallel": {"context": 2, "expert": 2},
        "zero": {"stage": 2},
        "ranks": 4,
    },
    "one-rank": {"model": EXPERTS, "parallel": {"context": 1}, "train": {"micro_batch_rows": 2}, "ranks": 1},
    "stopped": {
        "model": {**EXPERTS, "balance_scope": "global_batch", "residual_dropout": 0.1},
        "train": {"steps": 4, "stop_after": 2},
    },
}
"""First runs by name: changes of ``TRAINING``, the model's fields; ranks and ranks a node where these are not 2."""

_STOPPED = RUNS["stopped"]
LATER_RUNS: dict[str, Settings] = {
    "resumed": {**_STOPPED, "train": {"steps": 4}, "run": {"resume": "{runs}/stopped/checkpoints/step_000002"}},
    "resumed-zero3-data": {
        **_STOPPED,
        "train": {"steps": 4},
        "run": {"resume": "{runs}/stopped/checkpoints/step_000002"},
        "parallel": {"context": 1},
        "zero": {"stage": 3},
    },
    "replayed": {
        "model": {**_DEEPSEEK, "balance_scope": "micro_batch", "selection_bias_rate": 1e-2},
        "parallel": {"context": 1, "expert": 2},
        "train": {"replay_routing": "{runs}/experts-expert2-micro-batch/routing"},
    },
    "started-from": {
        "model": {"rope": _YARN},
        "run": {"start_from": "{runs}/zero1-zigzag"},
    },
}
"""Runs that begin with what a first run left."""

QUICK_RUNS = ("zero1-zigzag", "experts-expert2-micro-batch", "experts-expert2-zero3-drop", "stopped", "resumed")

EXPORTED = ("zero1-zigzag", "sinks-ulysses2", "zero3-balanced-gpt2", "gemma-balanced")
"""Runs whose checkpoints go to Hugging Face folders; the first one also generates."""

LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")
MASKS: dict[str, Settings] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": 7},
    "sinks": {"window": 6, "sink_tokens": 3},
    "stride": {"window": 4, "stride": 3},
}
NUM_TOKENS = 96
DOCUMENTS: dict[str, list[int]] = {
    "one": [0, NUM_TOKENS],
    "packed": [0, 1, 5, 32, 33, 60, 89, NUM_TOKENS],
}

_HF: Settings = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
_HF_EXPERTS: Settings = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "norm_topk_prob": True,
}  # fmt: skip
_HF_LATENT: Settings = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
}  # fmt: skip
FAMILIES: dict[str, Settings] = {
    "Llama": {**_HF, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "Mistral": {**_HF, "sliding_window": 7, "head_dim": 12},
    "Qwen2": {**_HF, "tie_word_embeddings": True},
    "Qwen2Moe": {**_HF, **_HF_EXPERTS, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1]},
    "Qwen3": {**_HF, "head_dim": 12},
    "Qwen3Moe": {**_HF, **_HF_EXPERTS, "head_dim": 12, "decoder_sparse_step": 2},
    "Mixtral": {**_HF, "num_local_experts": 5, "num_experts_per_tok": 2},
    "Olmoe": {**_HF, "num_experts": 6, "num_experts_per_tok": 3},
    "Gemma2": {**_HF, "head_dim": 12, "sliding_window": 6, "query_pre_attn_scalar": 19},
    "GPT2": {
        "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 97, "n_inner": 52,
        "bos_token_id": None, "eos_token_id": None,
    },
    "DeepseekV2": {**_HF, **_HF_LATENT, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7},
    "DeepseekV3": {**_HF, **_HF_LATENT, "attention_bias": True},
    "GptOss": {**_HF, "head_dim": 12, "sliding_window": 6, "num_local_experts": 5, "num_experts_per_tok": 2},
}  # fmt: skip
"""transformers configs of each family; the class is the name followed by Config."""

QUICK_FAMILIES = ("Llama", "GPT2", "DeepseekV3", "GptOss")

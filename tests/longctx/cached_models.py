"""Tiny models of every kind of attention, to be read chunk by chunk and continued."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from longctx.architecture.rope import Rope
from longctx.batch import IGNORED_TARGET
from longctx.config import ModelConfig
from longctx.generation import Greedy, Sampling
from longctx.model.decoder import Decoder

_STRETCHED = {"factor": 4.0, "original_max_positions": 8}
_EXPERTS = {"num_experts": 12, "experts_per_token": 2, "expert_ffn_size": 16, "shared_ffn_size": 12}

MODELS: dict[str, dict] = {
    "grouped": {},
    "one key head": {"num_kv_heads": 1, "qk_norm": "head"},
    "window": {"layers": ("window", "full"), "window": 5, "sinks": True},
    "narrow window": {"layers": ("window",), "window": 1},
    "sparse": {"layers": ("sparse", "full"), "window": 3, "sparse_stride": 4},
    "sparse, prime stride": {"layers": ("sparse",), "window": 2, "sparse_stride": 7, "sinks": True},
    "linear": {"layers": ("linear", "full")},
    "linear alone": {"layers": ("linear",)},
    "gated delta": {"layers": ("gated_delta", "full"), "delta_value_heads": 8, "attention_gate": True},
    "kimi": {"layers": ("kda", "full"), "delta_negative": True},
    "mamba": {"layers": ("mamba2", "full"), "delta_key_heads": 1, "delta_value_heads": 4},
    "all kinds": {"layers": ("linear", "sparse", "full", "window"), "num_layers": 4, "window": 10, "sparse_stride": 3},
    "latent": {"num_kv_heads": 4, "kv_lora_rank": 12, "rope_head_dim": 4, "value_head_dim": 6, "q_lora_rank": 10},
    "latent, window": {
        **{"num_kv_heads": 4, "kv_lora_rank": 12, "rope_head_dim": 4, "value_head_dim": 10, "sinks": True},
        **{"layers": ("window", "full"), "window": 4},
    },
    "latent, linear": {
        **{"num_kv_heads": 4, "kv_lora_rank": 12, "rope_head_dim": 4, "value_head_dim": 6},
        **{"layers": ("linear", "full")},
    },
    "soft cap": {"attention_softcap": 2.0, "norm_order": "sandwich"},
    "alibi": {"position": "alibi", "layers": ("window", "full"), "window": 6},
    "t5": {"position": "t5", "relative_buckets": 6, "relative_max_distance": 11, "layers": ("sparse", "full")}
    | {"window": 3, "sparse_stride": 4},
    "relative": {"position": "relative"},
    "learned": {"position": "learned", "max_positions": 64},
    "dynamic": {"rope": Rope(kind="dynamic", **_STRETCHED)},
    "longrope": {
        "rope": Rope(kind="longrope", **_STRETCHED, short_factor=(1.0, 1.1, 1.3, 2.0), long_factor=(1.0, 2.0, 5.0, 9.0))
    },
    "experts": {**_EXPERTS, "layers": ("window", "full"), "window": 6},
}


def config_of(name: str) -> ModelConfig:
    """The configuration; weights are large enough that tokens differ."""
    sizes = {"vocab_size": 61, "hidden_size": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    return ModelConfig(**{**sizes, "ffn_size": 20, "init_std": 0.4, **MODELS[name]})


def ids_of(length: int) -> list[int]:
    """A prompt of so many tokens."""
    return torch.randint(61, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@torch.no_grad()
def whole_nll(decoder: Decoder, ids: list[int]) -> Tensor:
    """The negative log-likelihoods of a prompt that is read in one pass, without a cache."""
    hidden = decoder(torch.tensor([ids]), torch.arange(len(ids))[None])
    return decoder.token_nll(hidden, torch.tensor([[*ids[1:], IGNORED_TARGET]]))[0, :-1]


@torch.inference_mode()
def without_cache(
    decoder: Decoder,
    prompt: list[int],
    num_tokens: int,
    strategy: Greedy | Sampling | None = None,
    stop_ids: Collection[int] = (),
) -> list[int]:
    """What ``generate`` gives, by reading everything again at each step."""
    choose, new_ids = (strategy or Greedy()).start(), []
    while len(new_ids) < num_tokens and not (new_ids and new_ids[-1] in stop_ids):
        ids_BT = torch.tensor([prompt + new_ids])
        hidden_BTM = decoder(ids_BT, torch.arange(ids_BT.shape[1])[None])
        new_ids.append(choose(decoder.logits(hidden_BTM[:, -1:])[0, 0].float()))
    return new_ids

"""Tiny models of random weights in both libraries, and what transformers' ``generate`` makes of a prompt."""

from __future__ import annotations

from pathlib import Path

import torch

from longctx.conversion import save_hf
from longctx.model.decoder import Decoder
from tests.longctx.samples import dense_config, randomize, tiny_config

PROMPT = [5, 17, 3, 96, 41, 0, 8]
CONFIGS = {"moe": tiny_config(tie_embeddings=False), "dense": dense_config(qkv_bias=False, tie_embeddings=False)}


def random_model(name: str) -> Decoder:
    """A model of large random weights: its tokens vary."""
    model = Decoder(CONFIGS[name], seed=None)
    randomize(model, std=0.3, seed=2)
    return model


def in_transformers(model: Decoder, folder: Path):
    """The same model there."""
    import transformers

    save_hf(model.config, model.state_dict(), folder)
    return transformers.AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True).eval()


def theirs(reference, prompt: list[int], num_tokens: int, **options) -> list[int]:
    """The new tokens of transformers, at seed 11."""
    torch.manual_seed(11)
    ids = torch.tensor([prompt])
    # min_new_tokens would stop early tokens from being the end id; these models have none
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, **options)
    return out[0, len(prompt) :].tolist()

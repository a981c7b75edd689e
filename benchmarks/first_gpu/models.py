"""A small decoder with every GPU-specific part, and its loss and gradients on any device.

Axes: B rows, t tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

from launcher.verification.compare import part_of
from longctx.batch import IGNORED_TARGET, Batch, PackedDocuments
from longctx.config import ModelConfig
from longctx.model.attention.local import LocalAttention
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution
from longctx.objectives.causal_lm import CausalLM


def small_config(*, width: int, layers: int, head_dim: int, vocab_size: int = 4096) -> ModelConfig:
    """Return a dense decoder with grouped keys (8 heads, 2 KV heads). A vocabulary of 4,096 consists of full pages."""
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_layers=layers,
        num_heads=8,
        num_kv_heads=2,
        head_dim=head_dim,
        ffn_size=3 * width,
        qkv_bias=False,
        tie_embeddings=False,
    )


def packed_row(lengths: list[int], vocab_size: int) -> Batch:
    """Return one row of documents with these lengths and random tokens."""
    generator = torch.Generator().manual_seed(0)
    bounds = tuple(accumulate(lengths, initial=0))
    tokens = torch.randint(vocab_size, (bounds[-1],), generator=generator)
    targets = tokens.roll(-1)
    targets[torch.tensor(bounds[1:]) - 1] = IGNORED_TARGET
    positions = torch.cat([torch.arange(length) for length in lengths])
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return Batch(
        tokens=tokens[None],
        targets=targets[None],
        positions=positions[None],
        document_ids=ids[None],
        documents=PackedDocuments(bounds),
    )


def loss_and_gradients(
    config: ModelConfig,
    batch: Batch,
    *,
    device: str,
    dtype: torch.dtype,
    rounded: torch.dtype | None = None,
    kernel: str = "auto",
    execution: Execution | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss and every gradient, in float64 on the CPU, for weights drawn from the same seed.

    ``rounded`` rounds the weights first, so that a reference has the same values as the model in that dtype.
    """
    decoder = Decoder(config, {"softmax": LocalAttention(kernel)}, execution=execution or Execution(), seed=0)
    if rounded is not None:
        decoder.to(rounded)
    lm = CausalLM(decoder).to(device=device, dtype=dtype)
    loss = lm.loss_sum(lm(batch.to(torch.device(device))))
    mean = loss["objective"] / batch.num_targets
    mean.backward()
    named = lm.network.named_parameters()
    return float(mean.detach()), {name: p.grad.double().cpu() for name, p in named if p.grad is not None}


def relative(got: Tensor, want: Tensor) -> float:
    """Return the Frobenius distance as a fraction of the reference's norm; infinite if any value is NaN."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    error = float((got - want).norm() / want.norm().clamp_min(1e-300))
    return error if error == error else float("inf")


def worst_part(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative error over the model's parameters, and its parameter; infinite if a gradient is
    missing.
    """
    parts: dict[str, list[str]] = {}
    for name in want:
        parts.setdefault(part_of(name), []).append(name)
    found = []
    for part, names in parts.items():
        if any(name not in got for name in names):
            return float("inf"), part
        of_part = (torch.cat([side[name].flatten() for name in names]) for side in (got, want))
        found.append((relative(*of_part), part))
    return max(found)

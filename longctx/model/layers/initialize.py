"""Initial weights as a function of a seed and a tensor's name, equal for every process and world size."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from longctx.config import ModelConfig

BLOCK_VALUES = 1 << 20
"""Values per section: 4 MiB, generated in some 10 ms. Another number gives other initial weights."""
COPIED_VALUES = 1 << 24
"""Values read at a time: 64 MiB, however large the tensor is."""


def initial_value(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """Return the initial value for parameter ``name``, float32 on the CPU.

    Norms multiply by 1, biases and sinks are 0; all others are normal with ``config.init_std``, token embeddings with
    ``config.embedding_std`` if it is set. Projections that write to the residual stream are divided by the root of
    their number, which keeps its variance independent of depth (GPT-2).
    """
    numel = torch.Size(shape).numel()
    return InitialTensor(name, numel, config, seed).read(0, numel).view(shape)


def initial_buffer(name: str) -> float:
    """Return a buffer's initial value: 1 for factors, 0 for biases."""
    return float(name.endswith("layer_scalar"))


_TO_STREAM = ("o_proj", "down_proj", "out_proj")
"""Name parts of projections that write to the residual stream."""


def _uniform(normal: Tensor, bound: float) -> Tensor:
    """Map normal values to uniform ones, from -bound to bound."""
    return torch.special.ndtr(normal).mul_(2 * bound).sub_(bound)


def _log_rates(normal: Tensor) -> Tensor:
    """Map normal values to logarithms of decay rates, uniform from 1 to 16 (Mamba-2)."""
    return torch.special.ndtr(normal).mul_(15).add_(1).log_()


def _rate_biases(normal: Tensor, least: float) -> Tensor:
    """Map normal values to inputs from which softplus makes log-uniform steps, from ``least`` to 100 times that."""
    steps = torch.special.ndtr(normal).mul_(math.log(100)).add_(math.log(least)).exp_()
    return steps + torch.log(-torch.expm1(-steps))


_LEAST_STEP, _LEAST_DECAY = 0.001, 0.00005
"""Mamba's steps are also the strength of a token's write. A delta rule's only decay: with Mamba's, most heads forget
within a dozen tokens, and models that start so do not learn to recall in the time of softmax layers."""


def _function_of(name: str, config: ModelConfig) -> Callable[[Tensor], Tensor] | None:
    """Return the function from normal values to non-normal initial weights; None for normal ones."""
    *_, layer, _, weight, _ = ["", "", "", "", *name.split(".")]
    if weight == "A_log":
        return _log_rates
    if weight != "dt_bias":
        return None
    is_mamba = layer.isdigit() and config.layer_kind(int(layer)) == "mamba2"
    return partial(_rate_biases, least=_LEAST_STEP if is_mamba else _LEAST_DECAY)


# A tensor is generated in sections, each with its own key: a rank generates only the sections that it holds a part of,
# and any partition of the tensor gives the same values.
class InitialTensor:
    """One parameter's flattened ``initial_value``, readable in any range; best in ascending order."""

    def __init__(self, name: str, numel: int, config: ModelConfig, seed: int) -> None:
        """Set up the tensor; ``numel`` counts the values in the full model's tensor."""
        self._name, self._numel, self._seed = name, numel, seed
        self._constant, self._std = _constant(name, config), config.init_std
        if name.endswith("embed_tokens.weight") and config.embedding_std:
            self._std = config.embedding_std
        self._function = _function_of(name, config)
        if name.endswith("lora_A"):
            # Rows of all experts together, as PEFT initializes them (uniform up to 1 / √fan-in).
            rows = config.adapter.rank * (config.num_experts if ".experts." in name else 1)
            self._function = partial(_uniform, bound=(numel // rows) ** -0.5)
        if "conv1d" in name:
            self._std = (3 * config.delta_conv) ** -0.5
        if any(part in name for part in _TO_STREAM):
            self._std /= _sums(name, config) ** 0.5
        self._block_index, self._block = -1, torch.empty(0)

    def read(self, start: int, count: int) -> Tensor:
        """Return ``count`` values from ``start``, float32 on the CPU."""
        assert 0 <= start <= start + count <= self._numel, f"{self._name} has no values {start} to {start + count}"
        if self._constant is not None:
            return torch.full((count,), self._constant)
        out, done = torch.empty(count), 0
        while done < count:
            number, inside = divmod(start + done, BLOCK_VALUES)
            part = out[done : done + min(BLOCK_VALUES - inside, count - done)]
            if len(part) == self._size(number):
                self._draw(number, part)
            else:
                part.copy_(self._kept(number)[inside : inside + len(part)])
            done += len(part)
        # Each value depends only on its own normal value, so ranges can be read as for other weights.
        if self._function is not None:
            return self._function(out)
        return out.mul_(self._std)

    def copy_to(self, out: Tensor, start: int) -> None:
        """Fill the flat tensor ``out`` with the values from ``start``."""
        for at in range(0, len(out), COPIED_VALUES):
            block = out[at : at + COPIED_VALUES]
            block.copy_(self.read(start + at, len(block)))

    def _size(self, number: int) -> int:
        """Return a section's size; the last section has the remainder."""
        return min(BLOCK_VALUES, self._numel - number * BLOCK_VALUES)

    def _kept(self, number: int) -> Tensor:
        """Return a section, cached for the range that continues inside it."""
        if self._block_index != number:
            self._block, self._block_index = torch.empty(self._size(number)), number
            self._draw(number, self._block)
        return self._block

    def _draw(self, number: int, out: Tensor) -> None:
        # No value depends on which tensors and parts a process holds. The key has 128 bits: PyTorch's generator takes
        # 32 from a seed, and among a million sections some would be equal.
        digest = hashlib.sha256(f"{self._seed}:{self._name}:{number}".encode()).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))
        generator.standard_normal(dtype=np.float32, out=out.numpy())


def _sums(name: str, config: ModelConfig) -> int:
    """Count the projections that write to the residual stream in a tensor's stack."""
    if name.startswith("encoder."):
        return 2 * config.encoder_layers
    if config.encoder_layers:
        return 3 * config.num_layers  # cross attention's too
    return 2 * config.num_layers


def _constant(name: str, config: ModelConfig) -> float | None:
    """Return a constant parameter's value; None if the parameter is random."""
    if name.endswith("norm.weight"):
        # A gated delta layer's inner norm never adds 1.
        if name.endswith(("self_attn.norm.weight", "self_attn.o_norm.weight")):
            return 1.0
        if config.norm_offset:
            return 0.0  # the factor is 1 + weight
        return 1.0
    if name.endswith("lora_B"):
        return 0.0
    if name.endswith("self_attn.skip.weight"):
        return 1.0
    if name.endswith((".bias", "_bias", "conv_bias.weight", "sinks.weight")) or "relative_bias" in name:
        return 0.0
    return None

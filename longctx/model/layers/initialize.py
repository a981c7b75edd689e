"""Initial weights as a function of a seed and a tensor's name, so that every process and world size starts equal.

A tensor is drawn in blocks, each by a key of its own: a rank draws the blocks that it holds a part of.
"""

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
"""Values of a block: 4 MiB, drawn in some 10 ms. Another number gives other initial weights."""
COPIED_VALUES = 1 << 24
"""Values that are read at a time: 64 MiB, however large the tensor is."""


def initial_value(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """Return the initial value of the parameter ``name``, float32 on the CPU.

    Norms multiply by 1, biases and sinks are 0; all others are normal with ``config.init_std``, token embeddings with
    ``config.embedding_std`` if it is set. Projections that write to the residual stream are smaller by the root of
    their number, which keeps its variance independent of depth (GPT-2).
    """
    numel = torch.Size(shape).numel()
    return InitialTensor(name, numel, config, seed).read(0, numel).view(shape)


def initial_buffer(name: str) -> float:
    """Return the initial value of a buffer: 1 for factors, 0 for biases."""
    return float(name.endswith("layer_scalar"))


_TO_STREAM = ("o_proj", "down_proj", "out_proj")
"""In names of projections that write to the residual stream."""


def _log_rates(normal: Tensor) -> Tensor:
    """Return logarithms of decay rates that are uniform from 1 to 16 (Mamba-2)."""
    return torch.special.ndtr(normal).mul_(15).add_(1).log_()


def _rate_biases(normal: Tensor, least: float) -> Tensor:
    """Return inputs that softplus maps to steps from ``least`` to 100 times that, uniform in their logarithm."""
    steps = torch.special.ndtr(normal).mul_(math.log(100)).add_(math.log(least)).exp_()
    return steps + torch.log(-torch.expm1(-steps))


_LEAST_STEP, _LEAST_DECAY = 0.001, 0.00005
"""Steps of Mamba are also the strength of what a token writes. Those of a delta rule only decay: with Mamba's, most
heads forget within a dozen tokens, and models that begin so do not learn to recall in the time of softmax layers."""


def _function_of(name: str, config: ModelConfig) -> Callable[[Tensor], Tensor] | None:
    """Return the function of normal values for weights whose initial values are not normal; None for the others."""
    *_, layer, _, weight, _ = ["", "", "", "", *name.split(".")]
    if weight == "A_log":
        return _log_rates
    if weight != "dt_bias":
        return None
    is_mamba = layer.isdigit() and config.layer_kind(int(layer)) == "mamba2"
    return partial(_rate_biases, least=_LEAST_STEP if is_mamba else _LEAST_DECAY)


class InitialTensor:
    """The flattened ``initial_value`` of one parameter, of which any range can be read; best in ascending order."""

    def __init__(self, name: str, numel: int, config: ModelConfig, seed: int) -> None:
        """Set up the tensor; ``numel`` is the number of values of the full model's tensor."""
        self._name, self._numel, self._seed = name, numel, seed
        self._constant, self._std = _constant(name, config), config.init_std
        if name.endswith("embed_tokens.weight") and config.embedding_std:
            self._std = config.embedding_std
        self._function = _function_of(name, config)
        if "conv1d" in name:
            self._std = (3 * config.delta_conv) ** -0.5
        if any(part in name for part in _TO_STREAM):
            self._std /= _sums(name, config) ** 0.5
        self._drawn, self._block = -1, torch.empty(0)

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
        # Each value depends only on its own normal value, so ranges of them can be read as of other weights.
        if self._function is not None:
            return self._function(out)
        return out.mul_(self._std)

    def copy_to(self, out: Tensor, start: int) -> None:
        """Set the flat tensor ``out`` to the values from ``start``."""
        for at in range(0, len(out), COPIED_VALUES):
            block = out[at : at + COPIED_VALUES]
            block.copy_(self.read(start + at, len(block)))

    def _size(self, number: int) -> int:
        """Return the number of values of a block: the last one has the rest."""
        return min(BLOCK_VALUES, self._numel - number * BLOCK_VALUES)

    def _kept(self, number: int) -> Tensor:
        """Return a block, which is kept for the range that continues inside of it."""
        if self._drawn != number:
            self._block, self._drawn = torch.empty(self._size(number)), number
            self._draw(number, self._block)
        return self._block

    def _draw(self, number: int, out: Tensor) -> None:
        # No value depends on which tensors and parts of them a process holds. The key has 128 bits: PyTorch's generator
        # takes 32 of a seed, and among a million blocks some would be equal.
        digest = hashlib.sha256(f"{self._seed}:{self._name}:{number}".encode()).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))
        generator.standard_normal(dtype=np.float32, out=out.numpy())


def _sums(name: str, config: ModelConfig) -> int:
    """Return the number of projections that are added to the residual stream of a tensor's stack."""
    if name.startswith("encoder."):
        return 2 * config.encoder_layers
    if config.encoder_layers:
        return 3 * config.num_layers  # cross attention's too
    return 2 * config.num_layers


def _constant(name: str, config: ModelConfig) -> float | None:
    """Return the value of a parameter that is not random, else None."""
    if name.endswith("norm.weight"):
        # The norm inside of a gated delta layer never adds 1.
        if name.endswith(("self_attn.norm.weight", "self_attn.o_norm.weight")):
            return 1.0
        if config.norm_offset:
            return 0.0  # the factor is 1 + weight
        return 1.0
    if name.endswith("self_attn.skip.weight"):
        return 1.0
    if name.endswith((".bias", "_bias", "conv_bias.weight", "sinks.weight")) or "relative_bias" in name:
        return 0.0
    return None

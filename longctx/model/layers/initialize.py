"""Initial weights as a function of a seed and a tensor's name, so that every process and world size starts equal.

Any range of a tensor is drawn without the rest of it: a rank draws what it holds.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from longctx.config import ModelConfig
from longctx.model.layers.skip_ahead import skip_ahead

BLOCK_VALUES = 1 << 24
"""Values that are drawn at a time: 64 MiB, however large the tensor is."""
GROUP = 16
"""PyTorch makes so many normal values of so many random words, and of the last words of a tensor once more."""


def initial_value(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """The initial value of the parameter ``name``, float32 on the CPU.

    Norms multiply by 1, biases and sinks are 0; all else is normal with ``config.init_std``. Projections that write to
    the residual stream are smaller by sqrt(2 · layers), which keeps its variance independent of depth (GPT-2).
    """
    numel = torch.Size(shape).numel()
    return InitialTensor(name, numel, config, seed).read(0, numel).view(shape)


class InitialTensor:
    """The flattened ``initial_value`` of one parameter, of which any range can be read; best in ascending order."""

    def __init__(self, name: str, numel: int, config: ModelConfig, seed: int) -> None:
        """``numel`` is the number of values of the whole model's tensor."""
        self._constant, self._std = _constant(name, config), config.init_std
        if "o_proj" in name or "down_proj" in name:
            self._std /= (2 * config.num_layers) ** 0.5
        # a generator for each tensor: no value depends on which tensors a process holds, or on their order
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        self._normals = NormalSequence(numel, int.from_bytes(digest[:8], "big") >> 1)

    def read(self, start: int, count: int) -> Tensor:
        """``count`` values from ``start``, float32 on the CPU."""
        if self._constant is not None:
            return torch.full((count,), self._constant)
        return self._normals.read(start, count).mul_(self._std)

    def copy_to(self, out: Tensor, start: int) -> None:
        """Set the flat tensor ``out`` to the values from ``start``, a block at a time."""
        for at in range(0, len(out), BLOCK_VALUES):
            block = out[at : at + BLOCK_VALUES]
            block.copy_(self.read(start + at, len(block)))


class NormalSequence:
    """What ``torch.randn(numel, generator=…)`` draws from a fresh CPU generator, bit for bit, in ranges.

    From 16 values on PyTorch makes each group of 16 out of as many random words. Where the last group is not full, the
    last 16 values are made anew, out of the 16 words that follow.
    """

    def __init__(self, numel: int, seed: int) -> None:
        self.numel, self.seed = numel, seed
        self._generator = torch.Generator()
        self._words_drawn = -1  # by the generator; not yet seeded
        self._last_group = torch.empty(0)

    def read(self, start: int, count: int) -> Tensor:
        """``count`` values from ``start``."""
        assert 0 <= start <= start + count <= self.numel
        out = torch.empty(count)
        if self.numel < GROUP:
            whole = torch.randn(self.numel, generator=self._generator.manual_seed(self.seed))
            return out.copy_(whole[start : start + count])
        # Values that are made in full groups, then those of the last 16 that are made anew.
        regular = self.numel
        if self.numel % GROUP:
            regular = self.numel - GROUP
        split = min(max(regular - start, 0), count)
        self._read_groups(out[:split], start)
        if split < count:
            first = start + split - regular
            out[split:] = self._draw(self.numel, GROUP)[first : first + count - split]
        return out

    def _read_groups(self, out: Tensor, start: int) -> None:
        """Set ``out`` to the values from ``start``, group by group where they begin or end inside of one."""
        done = 0
        while done < len(out):
            group, inside = divmod(start + done, GROUP)
            if inside or len(out) - done < GROUP:
                count = min(GROUP - inside, len(out) - done)
                out[done : done + count] = self._group(group)[inside : inside + count]
            else:
                count = (len(out) - done) // GROUP * GROUP
                self._seek(group * GROUP)
                torch.randn(count, generator=self._generator, out=out[done : done + count])
                self._words_drawn += count
            done += count

    def _group(self, number: int) -> Tensor:
        """The values of one group; those of the group drawn last are kept, for a range that goes on inside of it."""
        if self._words_drawn != (number + 1) * GROUP or not len(self._last_group):
            self._last_group = self._draw(number * GROUP, GROUP)
        return self._last_group

    def _draw(self, word: int, count: int) -> Tensor:
        """Values made of the ``count`` words from ``word``."""
        self._seek(word)
        self._words_drawn += count
        return torch.randn(count, generator=self._generator)

    def _seek(self, word: int) -> None:
        """Let the generator go on with this word."""
        self._last_group = torch.empty(0)
        if self._words_drawn != word:
            skip_ahead(self._generator.manual_seed(self.seed), word)
            self._words_drawn = word


def _constant(name: str, config: ModelConfig) -> float | None:
    """The value of a parameter that is not random."""
    if name.endswith("norm.weight"):
        if config.norm_offset:
            return 0.0  # the factor is 1 + weight
        return 1.0
    if name.endswith(("bias", "sinks.weight")) or "relative_bias" in name:
        return 0.0
    return None

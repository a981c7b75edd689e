"""Dropout and jitter as functions of a seed and of a value's token and channel: the same on any number of ranks, and
when recomputed.

Axes: B rows, t tokens of this rank, N = B·t, M model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx.kernels.dtypes import accumulate_dtype
from longctx.mixing import mix64

_CHUNK_VALUES = 1 << 21
"""Values whose random bits exist at a time: 8 MB of them, beside tensors that are hundreds of times as large."""


@dataclass(frozen=True, eq=False)
class Dropout:
    """Dropout of one forward pass, decided by a seed and the tokens; nothing is drawn from a generator."""

    rate: float
    """Probability that a value is dropped; what stays is scaled up by 1 / (1 − rate)."""
    seed: int
    """Of this micro-batch, any 64 bits."""
    token_Bt: Tensor
    """Each token's index in the whole micro-batch, on whatever rank; tokens 2^32 apart drop alike."""

    def __call__(self, x_BtM: Tensor, site: int) -> Tensor:
        """Return x with values dropped; ``site``, at least −1, distinguishes the layers of the network that drop."""
        return self.draw(site).drop(x_BtM)

    def draw(self, site: int) -> Draw:
        """Return the dropout of one such layer."""
        return Draw(_keys(self.seed, site, self.token_Bt), self.rate)


class Draw(NamedTuple):
    """Dropout of one layer of the network, without the seed: tensors and constants, which a compiled graph can take."""

    key_Bt: Tensor
    """32 bits for each token, int32."""
    rate: float

    def of_tokens(self, tokens: slice) -> Draw:
        """Return the dropout of some of the tokens."""
        return Draw(self.key_Bt[:, tokens], self.rate)

    def drop(self, x_BtM: Tensor) -> Tensor:
        """Return x with values dropped. Backward forms the same bits again and keeps only one number per token."""
        return _Dropped.apply(x_BtM, self.key_Bt, self.rate)


@dataclass(frozen=True, eq=False)
class Jitter:
    """Random factors of a router's input in one forward pass (arXiv 2101.03961 §2.4)."""

    width: float
    """Factors are spread evenly over 1 ± this."""
    seed: int
    """Of this micro-batch, any 64 bits."""
    token_Bt: Tensor
    """As ``Dropout``'s."""

    def of_tokens(self, tokens: slice) -> Jitter:
        """Return the jitter of some of the tokens."""
        return replace(self, token_Bt=self.token_Bt[:, tokens])

    def __call__(self, x_BtM: Tensor, layer: int) -> Tensor:
        """Multiply each value of x by a factor of its own, in float32 (float64 for float64).

        bfloat16 could not tell the factors apart. Layers have factors of their own. Backward forms them again.
        """
        return _Jittered.apply(x_BtM, _keys(self.seed, -2 - layer, self.token_Bt), self.width)


class _Dropped(torch.autograd.Function):
    """Autograd function of dropout, a linear map that is its own transpose."""

    @staticmethod
    def forward(ctx: Any, x_BtM: Tensor, token_Bt: Tensor, rate: float) -> Tensor:
        ctx.save_for_backward(token_Bt)
        ctx.rate = rate
        return _drop_anywhere(x_BtM, token_Bt, rate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BtM: Tensor):  # type: ignore[override]
        (token_Bt,) = ctx.saved_tensors
        return _drop_anywhere(dy_BtM, token_Bt, ctx.rate), None, None


class _Jittered(torch.autograd.Function):
    """Autograd function of jitter, its own transpose except for the dtypes."""

    @staticmethod
    def forward(ctx: Any, x_BtM: Tensor, token_Bt: Tensor, width: float) -> Tensor:
        ctx.save_for_backward(token_Bt)
        ctx.width, ctx.dtype = width, x_BtM.dtype
        return _jitter(x_BtM, token_Bt, width, accumulate_dtype(x_BtM.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BtM: Tensor):  # type: ignore[override]
        (token_Bt,) = ctx.saved_tensors
        return _jitter(dy_BtM, token_Bt, ctx.width, ctx.dtype), None, None


def _drop_anywhere(x_BtM: Tensor, token_Bt: Tensor, rate: float) -> Tensor:
    """Call ``_drop``, in a compiled graph as an operator: a compiler may change arithmetic that wraps around."""
    if torch.compiler.is_compiling():
        return torch.ops.longctx.drop.default(x_BtM, token_Bt, rate)
    return _drop(x_BtM, token_Bt, rate)


def _drop(x_BtM: Tensor, token_Bt: Tensor, rate: float) -> Tensor:
    """Return x / (1 − rate), and 0 for the values that the bits drop."""
    out_BtM = torch.empty_like(x_BtM, memory_format=torch.contiguous_format)
    x_NM, out_NM = x_BtM.reshape(-1, x_BtM.shape[-1]), out_BtM.view(-1, x_BtM.shape[-1])
    # bits are evenly spread int32: this share of them is below
    dropped_below = int(rate * 2**32) - 2**31
    for rows, bits in _bits(token_Bt, x_BtM.shape[-1]):
        torch.mul(x_NM[rows], 1 / (1 - rate), out=out_NM[rows]).masked_fill_(bits < dropped_below, 0)
    return out_BtM


def _jitter(x_BtM: Tensor, token_Bt: Tensor, width: float, dtype: torch.dtype) -> Tensor:
    """Return x times factors between 1 − width and 1 + width, in ``dtype``."""
    out_BtM = torch.empty(x_BtM.shape, dtype=dtype, device=x_BtM.device)
    x_NM, out_NM = x_BtM.reshape(-1, x_BtM.shape[-1]), out_BtM.view(-1, x_BtM.shape[-1])
    for rows, bits in _bits(token_Bt, x_BtM.shape[-1]):
        factors = bits.to(accumulate_dtype(dtype)).mul_(width / 2**31).add_(1)
        torch.mul(x_NM[rows], factors, out=out_NM[rows])
    return out_BtM


def _keys(seed: int, site: int, token_Bt: Tensor) -> Tensor:
    """Return 32 bits for each token, int32."""
    # One half of the key before the token is mixed and one after it: with only the first, two layers of the
    # network would draw the same values for tokens some distance apart.
    key = mix64(mix64(seed) + site)
    return _mix32((token_Bt + (key & 0x7FFFFFFF)).to(torch.int32)) ^ _signed(key >> 32)


def _bits(token_Bt: Tensor, width: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield 32 random bits for each of a token's values, int32, some rows at a time."""
    token_N = token_Bt.flatten()
    # an odd factor (2^32 / golden ratio, Knuth) spreads neighbouring channels over all 32 bits
    channel_M = torch.arange(width, device=token_N.device, dtype=torch.int32) * _signed(0x9E3779B1)
    step = max(_CHUNK_VALUES // max(width, 1), 1)
    for start in range(0, len(token_N), step):
        rows = slice(start, start + step)
        yield rows, _mix32(token_N[rows, None] ^ channel_M)


def _mix32(x: Tensor) -> Tensor:
    """Return 32 well mixed bits of each int32 (the finaliser of MurmurHash3).

    Products wrap, and shifts bring in zeros.
    """
    x = (x ^ (x >> 16 & 0xFFFF)) * _signed(0x85EBCA6B)
    x = (x ^ (x >> 13 & 0x7FFFF)) * _signed(0xC2B2AE35)
    return x ^ (x >> 16 & 0xFFFF)


def _signed(word: int) -> int:
    """Return 32 bits read as an int32."""
    if word >= 1 << 31:
        return word - (1 << 32)
    return word


def _fake_drop(x_BtM: Tensor, token_Bt: Tensor, rate: float) -> Tensor:
    return x_BtM.new_empty(x_BtM.shape)


_library = torch.library.Library("longctx", "FRAGMENT")
_library.define("drop(Tensor x, Tensor key, float rate) -> Tensor")
_library.impl("drop", _drop, "CompositeExplicitAutograd")
torch.library.register_fake("longctx::drop", _fake_drop, lib=_library)

"""Dropout and jitter as functions of seed, token and channel: equal on any number of ranks, and when recomputed.

Axes: B rows, t tokens of this rank, N = B·t, M model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx.integer_hash import mix64
from longctx.kernels.dtypes import accumulate_dtype

_CHUNK_VALUES = 1 << 21
"""Values with random bits in memory at a time: 8 MB, next to tensors hundreds of times as large."""


@dataclass(frozen=True, eq=False)
class Dropout:
    """One forward pass's dropout, decided by a seed and the tokens, without a random generator."""

    rate: float
    """Probability that a value is dropped; kept values are scaled up by 1 / (1 − rate)."""
    seed: int
    """The micro-batch's seed, any 64 bits."""
    token_Bt: Tensor
    """Each token's index in the full micro-batch, over all ranks; tokens 2^32 apart get equal masks."""

    def __call__(self, x_BtM: Tensor, site: int) -> Tensor:
        """Drop values in x; ``site``, at least −1, distinguishes the places in the network that drop."""
        return self.draw(site).drop(x_BtM)

    def draw(self, site: int) -> Draw:
        """Return the dropout for one such site."""
        return Draw(_keys(self.seed, site, self.token_Bt), self.rate)


class Draw(NamedTuple):
    """One site's dropout without the seed: tensors and constants, which a compiled graph can take."""

    key_Bt: Tensor
    """32 bits per token, int32."""
    rate: float

    def of_tokens(self, tokens: slice) -> Draw:
        """Return the dropout for some tokens."""
        return Draw(self.key_Bt[:, tokens], self.rate)

    def drop(self, x_BtM: Tensor) -> Tensor:
        """Drop values in x. Backward computes the same bits again, so only one number per token is kept."""
        return _Dropped.apply(x_BtM, self.key_Bt, self.rate)


@dataclass(frozen=True, eq=False)
class Jitter:
    """Random factors on a router's input in one forward pass (arXiv 2101.03961 §2.4)."""

    width: float
    """Factors are spread evenly over 1 ± this."""
    seed: int
    """The micro-batch's seed, any 64 bits."""
    token_Bt: Tensor
    """As in ``Dropout``."""

    def of_tokens(self, tokens: slice) -> Jitter:
        """Return the jitter for some tokens."""
        return replace(self, token_Bt=self.token_Bt[:, tokens])

    def __call__(self, x_BtM: Tensor, layer: int) -> Tensor:
        """Multiply each value in x by its own factor, in float32 (float64 for float64).

        bfloat16 could not tell the factors apart. Factors differ between layers. Backward computes them again.
        """
        return _Jittered.apply(x_BtM, _keys(self.seed, -2 - layer, self.token_Bt), self.width)


class _Dropped(torch.autograd.Function):
    """Autograd function for dropout, a linear map that is its own transpose."""

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
    """Autograd function for jitter, its own transpose except for the dtypes."""

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
    """Return x / (1 − rate), and 0 for dropped values."""
    out_BtM = torch.empty_like(x_BtM, memory_format=torch.contiguous_format)
    x_NM, out_NM = x_BtM.reshape(-1, x_BtM.shape[-1]), out_BtM.view(-1, x_BtM.shape[-1])
    # Bits are uniform over int32, so this threshold drops the right share.
    dropped_below = int(rate * 2**32) - 2**31
    for rows, bits in _bits(token_Bt, x_BtM.shape[-1]):
        torch.mul(x_NM[rows], 1 / (1 - rate), out=out_NM[rows]).masked_fill_(bits < dropped_below, 0)
    return out_BtM


def _jitter(x_BtM: Tensor, token_Bt: Tensor, width: float, dtype: torch.dtype) -> Tensor:
    """Multiply x by factors between 1 − width and 1 + width, in ``dtype``."""
    out_BtM = torch.empty(x_BtM.shape, dtype=dtype, device=x_BtM.device)
    x_NM, out_NM = x_BtM.reshape(-1, x_BtM.shape[-1]), out_BtM.view(-1, x_BtM.shape[-1])
    for rows, bits in _bits(token_Bt, x_BtM.shape[-1]):
        factors = bits.to(accumulate_dtype(dtype)).mul_(width / 2**31).add_(1)
        torch.mul(x_NM[rows], factors, out=out_NM[rows])
    return out_BtM


# Counter-based random numbers: each bit is a hash of seed, site, token index and channel. A rank computes its own
# tokens' bits in any order, as often as needed, and there is no generator state to save or to synchronize.
def _keys(seed: int, site: int, token_Bt: Tensor) -> Tensor:
    """Compute 32 bits per token, int32."""
    # One key half is added before the token is mixed, the other after: with only the first, two sites would draw the
    # same values for tokens some distance apart.
    key = mix64(mix64(seed) + site)
    return _mix32((token_Bt + (key & 0x7FFFFFFF)).to(torch.int32)) ^ _signed(key >> 32)


def _bits(token_Bt: Tensor, width: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield 32 random bits for each of a token's values, int32, some rows at a time."""
    token_N = token_Bt.flatten()
    # An odd factor (2^32 / golden ratio, Knuth) spreads neighbouring channels over all 32 bits.
    channel_M = torch.arange(width, device=token_N.device, dtype=torch.int32) * _signed(0x9E3779B1)
    step = max(_CHUNK_VALUES // max(width, 1), 1)
    for start in range(0, len(token_N), step):
        rows = slice(start, start + step)
        yield rows, _mix32(token_N[rows, None] ^ channel_M)


def _mix32(x: Tensor) -> Tensor:
    """Mix the 32 bits in each int32 (MurmurHash3's finalizer).

    Multiplications wrap, and shifts bring in zeros.
    """
    x = (x ^ (x >> 16 & 0xFFFF)) * _signed(0x85EBCA6B)
    x = (x ^ (x >> 13 & 0x7FFFF)) * _signed(0xC2B2AE35)
    return x ^ (x >> 16 & 0xFFFF)


def _signed(word: int) -> int:
    """Reinterpret 32 bits as an int32."""
    if word >= 1 << 31:
        return word - (1 << 32)
    return word


def _fake_drop(x_BtM: Tensor, token_Bt: Tensor, rate: float) -> Tensor:
    return x_BtM.new_empty(x_BtM.shape)


_library = torch.library.Library("longctx", "FRAGMENT")
_library.define("drop(Tensor x, Tensor key, float rate) -> Tensor")
_library.impl("drop", _drop, "CompositeExplicitAutograd")
torch.library.register_fake("longctx::drop", _fake_drop, lib=_library)

"""TokenPool: sums of hidden states by document.

Axes: B rows, t tokens of this rank, N = B·t, c tokens in a chunk, M model width, S sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from longctx.kernels.dtypes import accumulate_dtype


# A sum by document is the gradient of an embedding lookup by document number: PyTorch has an operator for it that adds
# in one order on every device, and its own gradient is that lookup.
@dataclass(frozen=True, eq=False)
class TokenPool:
    """Assignment of tokens to sums. Each token is in one sum, or in none."""

    numbers_Bt: Tensor
    """The sum that a token belongs to, int64; ``num_sums`` for none."""
    num_sums: int
    factors_S: Tensor | None = None
    """Factor on each sum; None for 1."""

    def apply(self, hidden_BtM: Tensor) -> Tensor:
        """Return the sums [S, M], at least in float32."""
        sums_SM: Tensor = _Sums.apply(hidden_BtM, self.numbers_Bt, self.num_sums)  # pyright: ignore[reportAssignmentType]
        return self.scaled(sums_SM)

    def of_chunk(self, hidden_BcM: Tensor, tokens: slice) -> Tensor:
        """Return the unscaled sums over one chunk of the tokens [S, M], without gradient."""
        return _sums(hidden_BcM, self.numbers_Bt[:, tokens], self.num_sums)

    def gradient_of_chunk(self, dout_SM: Tensor, tokens: slice, dtype: torch.dtype) -> Tensor:
        """Return a chunk's gradient [B, c, M] from the unscaled sums' gradient."""
        return _scatter(dout_SM, self.numbers_Bt[:, tokens], dtype)

    def scaled(self, sums_SM: Tensor) -> Tensor:
        """Multiply sums, or their gradients, by the factors."""
        if self.factors_S is None:
            return sums_SM
        return sums_SM * self.factors_S[:, None].to(sums_SM.dtype)


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_BtM: Tensor, numbers_Bt: Tensor, num_sums: int) -> Tensor:
        ctx.save_for_backward(numbers_Bt)
        ctx.dtype = hidden_BtM.dtype
        return _sums(hidden_BtM, numbers_Bt, num_sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_SM: Tensor):  # type: ignore[override]
        (numbers_Bt,) = ctx.saved_tensors
        return _scatter(dout_SM, numbers_Bt, ctx.dtype), None, None


def _sums(hidden_BtM: Tensor, numbers_Bt: Tensor, num_sums: int) -> Tensor:
    values_BtM = hidden_BtM.to(accumulate_dtype(hidden_BtM.dtype))
    # The row after the last sum is padding, which the operator leaves out.
    found = torch.ops.aten.embedding_dense_backward(values_BtM, numbers_Bt, num_sums + 1, num_sums, False)
    return found[:num_sums]


def _scatter(dout_SM: Tensor, numbers_Bt: Tensor, dtype: torch.dtype) -> Tensor:
    rows_SM = torch.cat([dout_SM, dout_SM.new_zeros(1, dout_SM.shape[1])])
    return functional.embedding(numbers_Bt, rows_SM).to(dtype)

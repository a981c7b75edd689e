"""Rows whose log-sum-exp is no number, for either form of ``merge_``; imported where Triton is missing, too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def check_broken_rows(merge: Callable[[Tensor, Tensor, Tensor, Tensor], None]) -> None:
    """A NaN log-sum-exp of either side makes the result's NaN, whatever the other's; a row without keys is still 0."""
    numbers = (torch.nan, -torch.inf, 0.5)
    pairs = torch.tensor([(a, b) for a in numbers for b in numbers], dtype=torch.float64)
    lse, block_lse = pairs.T.contiguous()
    out, block_out = torch.ones(len(pairs), 4), torch.full((len(pairs), 4), 2.0)
    out[lse == -torch.inf] = 0
    block_out[block_lse == -torch.inf] = 0
    has_nan, has_none = pairs.isnan().any(1), (pairs == -torch.inf).all(1)
    merge(out, lse, block_out, block_lse)
    assert torch.equal(lse.isnan(), has_nan)
    assert torch.equal(out.isnan().all(1), has_nan)
    assert torch.equal(lse == -torch.inf, has_none)
    assert (out[has_none] == 0).all()
    # Of keys on one side alone nothing is lost; equal sides count one half each.
    torch.testing.assert_close(out[~has_nan], torch.tensor([0.0, 2.0, 1.0, 1.5])[:, None].expand(-1, 4))

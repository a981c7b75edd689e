"""How far two right results of one computation may lie apart, where libraries round in another order."""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype
from parallel.audit.bits import Difference, difference

_UPDATE_ROUNDINGS = 32
"""More than AdamW rounds in any of its forms, each by half a unit in the last place of what it makes."""


def outside(a_nK: Tensor, b_Km: Tensor, found_nm: Tensor, other_nm: Tensor) -> Difference | None:
    """How two products of a and b differ where they differ by more than rounding; None where they do nowhere.

    A dot product of K terms, summed in any order with unit roundoff u, is off by at most γ·Σ|a·b| with γ = K·u / (1 −
    K·u) (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, §3.1). Rounding it to its dtype adds half
    a unit of that. Both results may be off by as much, in opposite directions.
    """
    terms = a_nK.shape[1]
    u = torch.finfo(accumulate_dtype(a_nK.dtype)).eps / 2
    gamma = (terms + 1) * u / (1 - (terms + 1) * u)
    sizes_nm = a_nK.abs().double() @ b_Km.abs().double()
    found, other = found_nm.double(), other_nm.double()
    rounding = torch.finfo(found_nm.dtype).eps / 2
    largest = torch.maximum(found.abs(), other.abs())
    bound_nm = 2 * (gamma * sizes_nm + rounding * largest) + torch.finfo(found_nm.dtype).tiny
    return _beyond(bound_nm, found_nm, other_nm)


def outside_update(before: Tensor, found: Tensor, other: Tensor) -> Difference | None:
    """How two results of AdamW for one tensor differ where they differ by more than rounding.

    ``before`` is the tensor before the step. AdamW forms sums of products: each rounding is relative to the larger of
    what a value was and what it is.
    """
    u = torch.finfo(found.dtype).eps / 2
    sizes = torch.maximum(before.abs(), torch.maximum(found.abs(), other.abs())).double()
    change = torch.maximum((found - before).abs(), (other - before).abs()).double()
    return _beyond(_UPDATE_ROUNDINGS * u * (sizes + change) + torch.finfo(found.dtype).tiny, found, other)


def _beyond(bound: Tensor, found: Tensor, other: Tensor) -> Difference | None:
    """The difference of the values that lie further apart than their bound."""
    # Also where a comparison with NaN says neither.
    is_inside = (found.double() - other.double()).abs() <= bound
    is_inside |= (found == other) | (found.isnan() & other.isnan())
    if bool(is_inside.all()):
        return None
    outside = ~is_inside
    differing = difference([found[outside].flatten()], [other[outside].flatten()])
    assert differing is not None
    return differing._replace(total=found.numel())

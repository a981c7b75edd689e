"""Inputs to one layer's experts: weights, tokens and options, the same on a CPU and an accelerator.

Axes: S received tokens, k experts per token, M model width, F FFN width of one expert (gate and up together: 2F), e
local experts, r rank of an adapter; I and O are one matmul's widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.kernels.quantized_weights import PackedLayout, dequantize
from longctx.model.experts.dispatch import ExpertRun


class Update(NamedTuple):
    """Low-rank update to a weight of all experts: Wx + B(Ax), with the adapter's scale in A."""

    a_erI: Tensor
    b_eOr: Tensor


class QuantizedExperts:
    """A quantized matrix of all experts, with a tensor's shape; an expert's values exist only after indexing."""

    def __init__(self, packed: Tensor, layout: PackedLayout, dtype: torch.dtype) -> None:
        """Wrap the parameter itself, not a view; ``dtype`` is the products'."""
        self.packed, self.layout, self.dtype = packed, layout, dtype
        self.shape = layout.shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, expert: int) -> Tensor:
        """Return one expert's values, [O, I]."""
        return dequantize(self.packed[expert], self.layout.of_matrix(), self.dtype)

    def of_experts(self, experts: Sequence[int] | None = None) -> Tensor:
        """Return these experts' values (default: all) as one tensor, [e, O, I]."""
        packed, layout = self.packed, self.layout
        if experts is not None:
            packed, layout = packed[list(experts)], layout.of_experts(len(experts))
        return dequantize(packed, layout, self.dtype)


def whole(weight_eOI: Tensor | QuantizedExperts) -> Tensor:
    """Return all experts' values as one tensor, [e, O, I], for a grouped matmul."""
    if isinstance(weight_eOI, QuantizedExperts):
        return weight_eOI.of_experts()
    return weight_eOI


class ExpertWeights(NamedTuple):
    """This process's expert parameters themselves, not views; and the updates to two of them if they have adapters."""

    gate_up_eFM: Tensor | QuantizedExperts
    down_eMF: Tensor | QuantizedExperts
    gate_up_bias_eF: Tensor | None
    down_bias_eM: Tensor | None
    gate_up_a_erM: Tensor | None = None
    gate_up_b_eFr: Tensor | None = None
    down_a_erF: Tensor | None = None
    down_b_eMr: Tensor | None = None

    @classmethod
    def of(
        cls, parameters: Sequence[Tensor | None], layouts: Sequence[PackedLayout | None], dtype: torch.dtype
    ) -> ExpertWeights:
        """Return the weights in these parameters; ``layouts`` are the two matrices', ``dtype`` is the products'."""
        weights: list = list(parameters)
        for number, layout in enumerate(layouts):
            if layout is not None:
                weights[number] = QuantizedExperts(weights[number], layout, dtype)
        return cls._make(weights)

    def select(self, experts: Sequence[int]) -> ExpertWeights:
        """Return the weights of these experts alone, dequantized."""
        chosen: list = []
        for weight in self:
            if isinstance(weight, QuantizedExperts):
                chosen.append(weight.of_experts(experts))
            else:
                chosen.append(None if weight is None else weight[list(experts)])
        return ExpertWeights._make(chosen)

    @property
    def gate_up_update(self) -> Update | None:
        """Update to gate and up; None without an adapter."""
        return _update(self.gate_up_a_erM, self.gate_up_b_eFr)

    @property
    def down_update(self) -> Update | None:
        """Update to the down projection; None without an adapter."""
        return _update(self.down_a_erF, self.down_b_eMr)


def _update(a_erI: Tensor | None, b_eOr: Tensor | None) -> Update | None:
    if a_erI is None or b_eOr is None:
        return None
    return Update(a_erI, b_eOr)


class DispatchedTokens(NamedTuple):
    """Tokens on their experts' process."""

    x_SM: Tensor
    gates_Sk: Tensor
    experts_Sk: Tensor
    """Ids relative to this process's first expert; negative if an assignment has no local expert."""
    num_assignments: int | None
    """Assignments with a local expert; None if only the device knows."""


class Needs(NamedTuple):
    """Which gradients are needed."""

    x: bool
    gates: bool
    gate_up: bool
    down: bool
    gate_up_bias: bool
    down_bias: bool
    gate_up_a: bool = False
    gate_up_b: bool = False
    down_a: bool = False
    down_b: bool = False

    @property
    def reads_x(self) -> bool:
        """True if a weight's gradient needs x."""
        return self.gate_up or self.gate_up_a or self.gate_up_b

    @property
    def reads_inner(self) -> bool:
        """True if a weight's gradient needs the activation's result."""
        return self.down or self.down_a or self.down_b


@dataclass(frozen=True, eq=False)
class ExpertsCall:
    """Options for one call to a layer's experts: everything but its tensors."""

    activation: str
    run: ExpertRun
    without_backward: bool = False
    """True if certainly no backward pass follows."""
    only_graph: bool = False
    """True if only the graph is needed, for backward, and the result is never read."""
    layouts: tuple[PackedLayout | None, PackedLayout | None] = (None, None)
    """Of gate and up, and of the down projection, if they are quantized."""


def saved_widths(recompute: str, weights: ExpertWeights, *, in_blocks: bool) -> tuple[int, ...]:
    """Return the widths of tensors that forward saves for backward, each [assignments, width] in x's dtype.

    They are gate and up; the activation times the router gate; x. ``recompute`` is one of ``dispatch.RECOMPUTE``.
    """
    M, F = weights.down_eMF.shape[1:]
    if recompute == "all":
        return ()
    if recompute == "activation":
        return (2 * F,)
    # Expert blocks find the activation's inputs in the cache: saving its result would gain no time.
    if in_blocks:
        return (2 * F, M)
    return (2 * F, F, M)

"""Inputs of the experts of one layer: weights, tokens and options, the same for a CPU and an accelerator.

Axes: S tokens that arrived, k experts a token, M model width, F FFN width of one expert (gate and up together: 2F),
e experts of this process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from longctx.model.experts.dispatch import ExpertRun


class Weights(NamedTuple):
    """Parameters of this process's experts, not views of them."""

    gate_up_eFM: Tensor
    down_eMF: Tensor
    gate_up_bias_eF: Tensor | None
    down_bias_eM: Tensor | None


class Tokens(NamedTuple):
    """Tokens on the process of their experts."""

    x_SM: Tensor
    gates_Sk: Tensor
    experts_Sk: Tensor
    """Ids that count from this process's first expert; negative where an assignment has no expert here."""
    num_assignments: int | None
    """Assignments that have their expert here; None where only the device knows."""


class Needs(NamedTuple):
    """Flags of the gradients that are needed."""

    x: bool
    gates: bool
    gate_up: bool
    down: bool
    gate_up_bias: bool
    down_bias: bool


@dataclass(frozen=True, eq=False)
class ExpertsCall:
    """Options of one call of a layer's experts: everything but its tensors."""

    activation: str
    run: ExpertRun
    without_backward: bool = False
    """Whether it is certain that no backward pass follows."""
    only_graph: bool = False
    """Whether only the graph is wanted, for backward, and nobody reads the result."""


def saved_widths(recompute: str, weights: Weights, *, in_blocks: bool) -> tuple[int, ...]:
    """Return the widths of the tensors that forward saves for backward, [assignments, width] in x's dtype.

    They are gate and up; the activation times the gate; x. ``recompute`` is one of ``dispatch.RECOMPUTE``.
    """
    M, F = weights.down_eMF.shape[1:]
    if recompute == "all":
        return ()
    if recompute == "activation":
        return (2 * F,)
    # blocks find all inputs of the activation in the cache: saving its result would gain nothing
    if in_blocks:
        return (2 * F, M)
    return (2 * F, F, M)

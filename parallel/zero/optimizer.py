"""AdamW, or Muon with it: options, parameter groups, the AdamW class, and the state before the first step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from longctx.checkpoint_format import ROLES
from longctx.objectives.task import Task

MASTER, MOMENTS = ROLES[0], ROLES[1:]
"""The float32 weight and AdamW's moments: the roles in a parameter's state."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW with decoupled weight decay on matrices only, or Muon for matrices in transformer blocks (``muon``)."""

    name: str = "adamw"
    """adamw or muon."""
    momentum: float = 0.95
    """Decay rate for Muon's gradient average."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down; 0 never."""
    fused: bool | None = None
    """Whether one kernel updates all tensors; None: on GPUs (``uses_fused_adamw``)."""


def optimizer_groups(model: Task, weight_decay: float, orthogonal: Collection[str] = ()) -> list[dict[str, Any]]:
    """Build parameter groups: matrices decay, norms and biases do not; sharded experts are separate.

    ``orthogonal`` parameters form separate groups, too: those with ``matrices``, for Muon. Frozen parameters are in
    none.
    """
    groups = []
    trained = [p for p in model.parameters() if p.requires_grad]
    muons = {id(p) for name, p in model.network.named_parameters() if name in orthogonal}
    # DeepSpeed reduces each group in one process group: marked experts over the ranks that hold the same ones.
    for name in dict.fromkeys(getattr(p, "group_name", None) for p in trained):
        of_experts = {}
        if name is not None:
            of_experts = {"moe": True, "name": name}
        parameters = [p for p in trained if getattr(p, "group_name", None) == name]
        rest = [p for p in parameters if id(p) not in muons]
        matrices, vectors = ([p for p in rest if (p.ndim >= 2) == wanted] for wanted in (True, False))
        kinds = [(matrices, weight_decay, False), (vectors, 0.0, False)]
        kinds.append(([p for p in parameters if id(p) in muons], weight_decay, True))
        for params, decay, is_muons in kinds:
            if params:  # DeepSpeed rejects an empty group
                groups.append({"params": params, "weight_decay": decay, "matrices": is_muons, **of_experts})
    return groups


class AdamW(torch.optim.AdamW):
    """PyTorch's AdamW, with methods that do not import torch.compile's tracer only to be excluded from tracing.

    The methods are PyTorch's own, without decorators. Importing the tracer takes a second at every start, and a run
    traces no function.
    """

    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = unwrap(torch.optim.AdamW.zero_grad)
    state_dict = unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = unwrap(torch.optim.AdamW.load_state_dict)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


def import_muon() -> None:
    """Import DeepSpeed's Muon with ``torch.compile`` disabled: it would compile three functions that are never called.

    Each ZeRO stage imports the module to check whether the optimizer is a Muon. Ours is an AdamW.
    """
    compile_function = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        torch.compile = compile_function


def fill_moments(inner: torch.optim.Optimizer, masters: list[Tensor]) -> None:
    """Create zero moments and a step counter for masters that lack them."""
    muons = getattr(inner, "flat_buffers", {})
    for p in masters:
        # A rank may hold no part of a buffer, and a resumed run already has moments.
        if p.numel() and not inner.state[p]:
            kept = MOMENTS[:1] if id(p) in muons else MOMENTS
            moments = {moment: torch.zeros_like(p) for moment in kept}
            inner.state[p].update(step=_step_counter(inner, p), **moments)


def _step_counter(inner: torch.optim.Optimizer, master: Tensor) -> Tensor | int:
    """Return a zero counter in the optimizer's form: a number for DeepSpeed's AdamW, a CPU tensor for PyTorch's, or a
    tensor on the master's device for its fused kernel.
    """
    if not isinstance(inner, torch.optim.AdamW):
        return 0
    if inner.defaults.get("fused"):
        return torch.zeros((), device=master.device)
    return torch.tensor(0.0)


def set_steps(inner: torch.optim.Optimizer, steps: int) -> None:
    """Set the optimizer's step count, from which it continues."""
    for state in inner.state.values():
        if isinstance(state.get("step"), Tensor):
            # A separate tensor each, on its device: AdamW increments in place, and a shared one would count once per
            # parameter.
            state["step"] = torch.full_like(state["step"], float(steps))
        elif "step" in state:
            state["step"] = steps


def masters_of(inner: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors that the optimizer updates."""
    return [p for group in inner.param_groups for p in group["params"]]

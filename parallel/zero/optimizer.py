"""The optimiser's options, and its groups of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longctx.objectives.task import Task


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW with decoupled weight decay on matrices alone."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down; 0 never."""
    fused: bool | None = None
    """Whether one kernel updates everything; None: on GPUs (``uses_fused_adamw``)."""


def optimizer_groups(model: Task, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms and biases do not. Experts that are spread over ranks are groups apart."""
    groups = []
    # DeepSpeed reduces a group in one process group: marked experts in that of the ranks that hold the same ones.
    for name in dict.fromkeys(getattr(p, "group_name", None) for p in model.parameters()):
        of_experts = {}
        if name is not None:
            of_experts = {"moe": True, "name": name}
        parameters = [p for p in model.parameters() if getattr(p, "group_name", None) == name]
        matrices, vectors = ([p for p in parameters if (p.ndim >= 2) == wanted] for wanted in (True, False))
        for params, decay in ((matrices, weight_decay), (vectors, 0.0)):
            if params:  # DeepSpeed refuses an empty group
                groups.append({"params": params, "weight_decay": decay, **of_experts})
    return groups

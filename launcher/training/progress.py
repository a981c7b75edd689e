"""``Progress``: where a run stands between two steps, and what a checkpoint holds of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from launcher.training.history import NO_HISTORY, History


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands between two steps. Each step returns a new one."""

    step: int = 0
    """Optimiser steps taken."""
    expert_load_LE: Tensor | None = None
    """How many tokens chose each expert in the last step; None before the first, and in a dense model."""
    history: History = NO_HISTORY
    """What the steps before say of the next one."""
    stop_asked: bool = False
    """Whether any rank has been asked to stop: the run ends here."""
    validation_due: bool = False
    """Whether the validation after this step was left out, or broken off, because of that."""

    def state(self) -> dict[str, Any]:
        """As a checkpoint has it."""
        expert_load = []
        if self.expert_load_LE is not None:
            expert_load = self.expert_load_LE.tolist()
        return {
            "step": self.step,
            # Fewer where some were left out. The optimiser corrects its moments' beginning by this number.
            "optimizer_steps": self.step - self.history.skipped,
            "expert_load": expert_load,
            "history": self.history.state(),
            "validation_due": self.validation_due,
        }

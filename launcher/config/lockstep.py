"""Whether data ranks wait for one another in each micro-batch, or at the end of a step alone."""

from __future__ import annotations

from launcher.config.sections import RunConfig


def in_lockstep(config: RunConfig) -> bool:
    """Whether they wait in each micro-batch: who deals out rows then puts rows of like work into one."""
    # Stages 2 and 3 reduce gradients as backward goes on, and stage 3 gathers weights; 0 and 1 reduce once a step.
    # Experts that a context group does not hold by itself are asked in every layer.
    stage = config.zero.stage
    assert stage != "auto", "``settle`` comes first"
    return stage >= 2 or config.parallel.context % config.parallel.expert != 0

"""``StepBytes``: bytes of a rank's device in a step, by kind. Plain values, which become JSON."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes of a rank's device memory, by kind."""

    weights: int
    """Arithmetic: of the working weights, what the ZeRO stage leaves here."""
    gradients: int
    """Arithmetic."""
    optimizer: int
    """Arithmetic: float32 masters and AdamW's two moments."""
    gathered: int
    """Arithmetic: whole weights that ZeRO 3 has here at once, at most."""
    reduction: int
    """Arithmetic: what DeepSpeed's buckets of gradients, and the copies that one becomes, add at the peak."""
    after_backward: int
    """Arithmetic: the flat copy of gradients that stages without buckets reduce, when nothing of forward is alive."""
    kept: int
    """Traced: what is alive between forward and backward."""
    kept_on_host: int
    """Traced: what of it lies in the machine's memory, pinned; on top of ``kept``, and in no other figure."""
    kept_on_disk: int = 0
    """Arithmetic: likewise, in train.store_path; a trace has no disk."""
    passing: int
    """Traced: what forward and backward add to that at their peak."""
    optimizer_step: int
    """Traced, or arithmetic: temporaries of AdamW's step, when nothing of forward is alive."""
    process: int = 0
    """Measured: of a CPU's memory, what a rank's program takes itself."""

    @property
    def held(self) -> int:
        """Bytes that are there all the time."""
        return self.process + self.weights + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """The most of a step."""
        within = self.gathered + self.reduction + self.kept + self.passing
        return self.held + max(within, self.after_backward, self.optimizer_step)

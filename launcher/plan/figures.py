"""What a trace says of a rank: plain values, which become JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from launcher.plan.host_waits import HostWait


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
    """Arithmetic: DeepSpeed's buckets of gradients, and the copies that one becomes on its way."""
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
    """Traced: temporaries of AdamW's step, when nothing of forward is alive."""

    @property
    def held(self) -> int:
        """Bytes that are there all the time."""
        return self.weights + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """The most of a step."""
        within = self.gathered + self.reduction + self.kept + self.passing
        return self.held + max(within, self.after_backward, self.optimizer_step)


@dataclass(frozen=True, kw_only=True)
class LinkBytes:
    """What a rank sends and receives over one kind of link in a step."""

    what: str
    link: str
    sent_bytes: int
    received_bytes: int
    messages: int


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """One step of one rank."""

    rank: int
    bytes: StepBytes
    peak_operator: str
    peak_place: str
    operators: int
    host_waits: list[HostWait]
    copies: int
    copied_bytes: int
    copied_to_host_bytes: int
    links: list[LinkBytes]
    is_whole: bool
    """False where the trace ended at a host wait; then its bytes are of the part before."""
    seconds: float
    most_called: list[tuple[str, int]]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        values = dataclasses.asdict(self)
        values["bytes"] |= {"held": self.bytes.held, "peak": self.bytes.peak}
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankTrace:
        """The inverse of ``to_json``."""
        of_bytes = {f.name: values["bytes"][f.name] for f in dataclasses.fields(StepBytes)}
        rest = {name: value for name, value in values.items() if name not in ("bytes", "host_waits", "links")}
        return cls(
            bytes=StepBytes(**of_bytes),
            host_waits=[HostWait(**wait) for wait in values["host_waits"]],
            links=[LinkBytes(**link) for link in values["links"]],
            **rest,
        )

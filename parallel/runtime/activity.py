"""Activity marks that this process sets for the watch, which reads them from its own thread.

A mark is a few assignments to one object, without clock or lock: the watch polls a few times per timeout and takes the
time itself when they have changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_NONE = -1


class Activity:
    """Current activity of the process. Every mark increments ``count``."""

    __slots__ = ("count", "disk", "hop", "layer", "patient", "phase", "step", "wait")

    def __init__(self) -> None:
        self.phase = "starting"
        self.step, self.layer, self.hop = 0, _NONE, _NONE
        self.wait = ""
        """The operation for which it waits on other ranks; empty while it computes."""
        self.patient = False
        """True while it waits for a rank that may be hours late."""
        self.disk = False
        """True while it may be silent for long: one file system call may take minutes."""
        self.count = 0

    def place(self) -> str:
        """Return a one-line position: "forward, layer 12, hop 3"."""
        text = self.phase
        if self.layer != _NONE:
            text += f", layer {self.layer}"
        if self.hop != _NONE:
            text += f", hop {self.hop}"
        return text

    def describe(self) -> str:
        """Return position and wait in one line: "forward, layer 12, hop 3: exchanging keys and values with …"."""
        text = self.place()
        if self.wait:
            text += f": {self.wait}"
        return text


# One per process, set by its main thread. Without a lock, the watch may see one mark's text with another's count; it
# reads both again a moment later.
ACTIVITY = Activity()


def begin(phase: str, *, step: int | None = None, disk: bool = False) -> None:
    """Mark the start of a step phase, or of work between steps."""
    ACTIVITY.phase, ACTIVITY.disk = phase, disk
    # Each phase has its own layers and hops.
    ACTIVITY.layer = ACTIVITY.hop = _NONE
    if step is not None:
        ACTIVITY.step = step
    ACTIVITY.count += 1


def enter_layer(layer: int) -> None:
    """Mark the layer that is computed from now on."""
    ACTIVITY.layer, ACTIVITY.hop = layer, _NONE
    ACTIVITY.count += 1


def enter_hop(hop: int) -> None:
    """Mark the ring hop that is computed or waited for from now on."""
    ACTIVITY.hop = hop
    ACTIVITY.count += 1


@contextmanager
def waiting(operation: str, *, patient: bool = False) -> Iterator[None]:
    """Mark that the process waits for other ranks within the ``with`` block."""
    # Waits may be nested: a library group's wait inside ours.
    before = ACTIVITY.wait, ACTIVITY.patient
    ACTIVITY.wait, ACTIVITY.patient = operation, patient
    ACTIVITY.count += 1
    try:
        yield
    finally:
        ACTIVITY.wait, ACTIVITY.patient = before
        ACTIVITY.count += 1

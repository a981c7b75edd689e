"""Activity marks that this process sets for the watch, which reads them from its own thread.

A mark is a few assignments to one object, without clock or lock: the watch polls a few times per timeout and takes the
time itself when they have changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_NONE = -1


class Doing:
    """Current activity of the process. Every mark increments ``count``."""

    __slots__ = ("count", "disk", "hop", "layer", "patient", "step", "wait", "what")

    def __init__(self) -> None:
        self.what = "starting"
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
        text = self.what
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
DOING = Doing()


def begin(what: str, *, step: int | None = None, disk: bool = False) -> None:
    """Mark the start of a step phase, or of work between steps."""
    DOING.what, DOING.disk = what, disk
    # Each phase has its own layers and hops.
    DOING.layer = DOING.hop = _NONE
    if step is not None:
        DOING.step = step
    DOING.count += 1


def enter_layer(layer: int) -> None:
    """Mark the layer that is computed from now on."""
    DOING.layer, DOING.hop = layer, _NONE
    DOING.count += 1


def enter_hop(hop: int) -> None:
    """Mark the ring hop that is computed or waited for from now on."""
    DOING.hop = hop
    DOING.count += 1


@contextmanager
def waiting(what: str, *, patient: bool = False) -> Iterator[None]:
    """Mark that the process waits for other ranks within the block."""
    # Waits may be nested: a library group's wait inside ours.
    before = DOING.wait, DOING.patient
    DOING.wait, DOING.patient = what, patient
    DOING.count += 1
    try:
        yield
    finally:
        DOING.wait, DOING.patient = before
        DOING.count += 1

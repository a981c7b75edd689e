"""Marks of this process's current work, left for the watch, which reads them from its own thread.

A mark is a few assignments to one object, without a clock and without a lock: the watch reads them a few times in a
time-out and notes the time itself when they have changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_NONE = -1


class Doing:
    """Current work of the process. Every mark increments ``count``."""

    __slots__ = ("count", "disk", "hop", "layer", "patient", "step", "wait", "what")

    def __init__(self) -> None:
        self.what = "starting"
        self.step, self.layer, self.hop = 0, _NONE, _NONE
        self.wait = ""
        """What it waits for from other ranks; empty where it computes."""
        self.patient = False
        """Whether it waits where another rank may be hours late."""
        self.disk = False
        """Whether it may be quiet for long: one call to a file system may take minutes."""
        self.count = 0

    def place(self) -> str:
        """Return the place on one line: "forward, layer 12, hop 3"."""
        text = self.what
        if self.layer != _NONE:
            text += f", layer {self.layer}"
        if self.hop != _NONE:
            text += f", hop {self.hop}"
        return text

    def describe(self) -> str:
        """Return it on one line: "forward, layer 12, hop 3: exchanging keys and values with …"."""
        text = self.place()
        if self.wait:
            text += f": {self.wait}"
        return text


# One per process, as its main thread. No lock: the watch may see one mark's words with another one's number, and reads
# them again a moment later.
DOING = Doing()


def begin(what: str, *, step: int | None = None, disk: bool = False) -> None:
    """Mark the start of a part of a step, or of work between steps."""
    DOING.what, DOING.disk = what, disk
    # A part has layers and hops of its own.
    DOING.layer = DOING.hop = _NONE
    if step is not None:
        DOING.step = step
    DOING.count += 1


def enter_layer(layer: int) -> None:
    """Mark the layer that is computed from now on."""
    DOING.layer, DOING.hop = layer, _NONE
    DOING.count += 1


def enter_hop(hop: int) -> None:
    """Mark the hop of the ring that is computed from now on, or waited for."""
    DOING.hop = hop
    DOING.count += 1


@contextmanager
def waiting(what: str, *, patient: bool = False) -> Iterator[None]:
    """Mark that the process waits for other ranks within the block."""
    # Waits may be nested: that of a library's group inside of one of ours.
    before = DOING.wait, DOING.patient
    DOING.wait, DOING.patient = what, patient
    DOING.count += 1
    try:
        yield
    finally:
        DOING.wait, DOING.patient = before
        DOING.count += 1

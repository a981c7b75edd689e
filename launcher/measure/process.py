"""What a rank's program takes of a CPU's memory, before it has a model worth the name."""

from __future__ import annotations

from collections.abc import Iterator

import psutil

from launcher.measure.clock import Clock
from launcher.measure.figures import Figure
from launcher.measure.sizes import Sizes
from launcher.measure.state import take_small_steps


def measure_process(clock: Clock, sizes: Sizes) -> Iterator[Figure]:
    """Resident bytes of this process; nothing on a GPU, whose memory has none of it."""
    if clock.device.type != "cpu":
        return
    # Much is imported by the first step, and some of it allocates.
    take_small_steps(clock, sizes)
    resident = psutil.Process().memory_info().rss
    yield Figure.of("process_bytes", resident, "resident memory of a rank after steps of a tiny model")

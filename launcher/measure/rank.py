"""One measuring process: ``python -m launcher.measure.rank RESULT``.

It reads its options as JSON from standard input, and its rank from the environment, as launchers set it. Rank 0 prints
each part's title before measuring it, and writes the mean over all ranks to RESULT.0. A rank that fails writes its
error to RESULT.<rank>.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from launcher.measure.figures import Figure, mean_over_ranks
from launcher.measure.sizes import BY_NAME
from longctx.errors import LongCtxError


def measure(orders: dict[str, Any], say: Callable[[str], None]) -> list[Figure]:
    """Join the process group and measure."""
    from parallel.comm.process import start_process_group, stop_process_group
    from parallel.runtime.device import choose_device

    device = choose_device(orders["device"], "--device")
    start_process_group(timeout_seconds=orders["timeout_seconds"], device=device)
    found = measure_together(orders, device, say)
    stop_process_group()
    return found


def measure_together(orders: dict[str, Any], device: torch.device, say: Callable[[str], None]) -> list[Figure]:
    """Return every entry's mean over all ranks, on each rank. Collective; requires a process group."""
    from parallel.comm.world import gather_objects

    own: list[Figure] = []
    for title, figures in _parts(orders, device):
        say(title)
        own.extend(figures)
    return [mean_over_ranks(of_ranks) for of_ranks in zip(*gather_objects(own), strict=True)]


def _parts(orders: dict[str, Any], device: torch.device) -> Iterator[tuple[str, Iterator[Figure]]]:
    """Yield each part's title and entries in order; a part is measured only when its entries are consumed."""
    sizes = BY_NAME[orders["sizes"] or device.type]
    # Late imports: DeepSpeed chooses its device when it is imported.
    from launcher.measure.attention import measure_attention, measure_products
    from launcher.measure.clock import Clock
    from launcher.measure.elementwise import measure_elementwise
    from launcher.measure.links import measure_links
    from launcher.measure.memory import measure_memory
    from launcher.measure.state import measure_process, measure_state

    clock = Clock(device, round_seconds=sizes.round_seconds, cpu_time=orders["cpu_time"])
    yield "the program itself", measure_process(clock, sizes)
    yield "memory and disk", measure_memory(clock, sizes, Path(orders["folder"]))
    yield "links between ranks", measure_links(clock, sizes)
    yield "products", measure_products(clock, sizes)
    yield "attention", measure_attention(clock, sizes)
    yield "norms, activations, copies, loss", measure_elementwise(clock, sizes)
    yield "gradients and optimizer", measure_state(clock, sizes)


def main(result: Path, orders: dict[str, Any]) -> None:
    """Measure, and write the entries or the error."""
    logging.disable(logging.WARNING)
    is_first = os.environ["RANK"] == "0"

    def say(title: str) -> None:
        if is_first:
            print(title, flush=True)  # noqa: T201

    written: dict[str, Any] = {}
    try:
        figures = measure(orders, say)
        written = {"figures": [dataclasses.asdict(figure) for figure in figures]}
    except LongCtxError as error:
        written = {"error": str(error), "kind": type(error).__name__}
    except Exception:
        written = {"error": traceback.format_exc(), "kind": ""}
    if is_first or "error" in written:
        result.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(written))
    sys.exit(int("error" in written))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.load(sys.stdin))

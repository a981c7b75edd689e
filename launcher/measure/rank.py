"""One measuring process: ``python -m launcher.measure.rank RESULT``.

It reads its options as JSON from standard input, and its rank from the environment, as launchers set it. Rank 0 prints
each benchmark's title before measuring it, and writes the mean over all ranks to RESULT.0. A rank that fails writes its
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

from launcher.measure.profile_entry import ProfileEntry, mean_over_ranks
from launcher.measure.sizes import BY_NAME
from longctx.errors import LongCtxError


def benchmark_rank(options: dict[str, Any], say: Callable[[str], None]) -> list[ProfileEntry]:
    """Join the process group and measure."""
    from parallel.comm.process import start_process_group, stop_process_group
    from parallel.runtime.device import choose_device

    device = choose_device(options["device"], "--device")
    start_process_group(timeout_seconds=options["timeout_seconds"], device=device)
    found = benchmark_all_ranks(options, device, say)
    stop_process_group()
    return found


def benchmark_all_ranks(
    options: dict[str, Any], device: torch.device, say: Callable[[str], None]
) -> list[ProfileEntry]:
    """Return every entry's mean over all ranks, on each rank. Collective; requires a process group."""
    from parallel.comm.world import gather_objects

    own: list[ProfileEntry] = []
    for title, entries in _parts(options, device):
        say(title)
        own.extend(entries)
    return [mean_over_ranks(of_ranks) for of_ranks in zip(*gather_objects(own), strict=True)]


def _parts(options: dict[str, Any], device: torch.device) -> Iterator[tuple[str, Iterator[ProfileEntry]]]:
    """Yield each benchmark's title and entries in order; a benchmark is executed only when its entries are consumed."""
    sizes = BY_NAME[options["sizes"] or device.type]
    # Late imports: DeepSpeed chooses its device when it is imported.
    from launcher.measure.attention_benchmark import benchmark_attention, benchmark_matmuls
    from launcher.measure.elementwise import benchmark_elementwise
    from launcher.measure.link_benchmark import benchmark_links
    from launcher.measure.memory_benchmark import benchmark_memory
    from launcher.measure.rank_timer import RankTimer
    from launcher.measure.state_benchmark import benchmark_process, benchmark_state

    timer = RankTimer(device, round_seconds=sizes.round_seconds, cpu_time=options["cpu_time"])
    yield "the process itself", benchmark_process(timer, sizes)
    yield "memory and disk", benchmark_memory(timer, sizes, Path(options["folder"]))
    yield "links between ranks", benchmark_links(timer, sizes)
    yield "products", benchmark_matmuls(timer, sizes)
    yield "attention", benchmark_attention(timer, sizes)
    yield "norms, activations, copies, loss", benchmark_elementwise(timer, sizes)
    yield "gradients and optimizer", benchmark_state(timer, sizes)


def main(result: Path, options: dict[str, Any]) -> None:
    """Measure, and write the entries or the error."""
    logging.disable(logging.WARNING)
    is_first = os.environ["RANK"] == "0"

    def say(title: str) -> None:
        if is_first:
            print(title, flush=True)  # noqa: T201

    written: dict[str, Any] = {}
    try:
        entries = benchmark_rank(options, say)
        written = {"figures": [dataclasses.asdict(entry) for entry in entries]}
    except LongCtxError as error:
        written = {"error": str(error), "kind": type(error).__name__}
    except Exception:
        written = {"error": traceback.format_exc(), "kind": ""}
    if is_first or "error" in written:
        result.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(written))
    sys.exit(int("error" in written))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.load(sys.stdin))

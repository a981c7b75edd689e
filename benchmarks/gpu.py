"""Common code for benchmarks on one GPU: command line, clock, peak memory, tables, and saved results."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from benchmarks.machine import RESULTS, machine


class Setting(Protocol):
    """Measurements and their device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def rounds(self) -> int: ...


S = TypeVar("S", bound=Setting)


# --- measuring ----------------------------------------------------------------------------------------------


class Stopwatch:
    """Seconds between marks: GPU time; on a CPU its processor time."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        """End one interval and begin the next."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.process_time())

    def spans(self) -> list[float]:
        """Return the seconds from each mark to the next."""
        if self.on_gpu:
            self.marks[-1].synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self.marks, self.marks[1:], strict=False)]
        return [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)]


def quickest(run: Callable[[Stopwatch], None], setting: Setting) -> list[float]:
    """Return the seconds between the marks that ``run`` sets: the minimum over some rounds after a warm-up."""
    found = []
    for _ in range(setting.rounds + 1):
        watch = Stopwatch(setting.device)
        run(watch)
        found.append(watch.spans())
    return [max(min(of), 1e-9) for of in zip(*found[1:], strict=True)]


def seconds(run: Callable[[], Any], setting: Setting) -> float:
    """Return the minimum seconds of the complete call over some rounds."""

    def marked(watch: Stopwatch) -> None:
        watch.mark()
        run()
        watch.mark()

    return quickest(marked, setting)[0]


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int | None:
    """Return the peak memory allocated during the call beyond earlier allocations; None without a counter."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# --- the report ---------------------------------------------------------------------------------------------


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print rows as a table with right-aligned numbers."""
    print(f"\n{title}")
    if not rows:
        print("  nothing measured")
        return
    cells = [[key.replace("_", " ") for key in rows[0]], *([_cell(x) for x in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  " + "  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 0.01 else f"{value:.3f}" if abs(value) < 10 else f"{value:.0f}"
    return str(value)


def device_name(device: torch.device) -> str:
    """Return the GPU's name; on a CPU that it is one."""
    return torch.cuda.get_device_name() if device.type == "cuda" else f"{machine()['processor']} (CPU)"


def main(
    name: str,
    description: str | None,
    *,
    full: Callable[[], S],
    tiny: Callable[[str], S],
    run: Callable[[S, float], dict[str, Any]],
    behind: Callable[[dict[str, Any]], list[str]] = lambda result: [],
    minutes: float,
    arguments: Sequence[str] | None = None,
) -> int:
    """Measure by ``run(setting, minutes)``, print and save; return 1 without a device or if a goal is missed."""
    first = (description or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=first)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: checks the script, measures nothing")
    parser.add_argument("--minutes", type=float, default=minutes, help="start no measurement after so many minutes")
    parser.add_argument("--output", type=Path, help=f"JSON file (default: benchmarks/results/CARD/{name}.json)")
    wanted = parser.parse_args(arguments)
    if wanted.device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device: nothing measured. (--device cpu --tiny checks the script.)", file=sys.stderr)
        return 1
    if wanted.device == "cpu" and not wanted.tiny:
        parser.error("--device cpu takes --tiny: at full size a CPU would need days")
    setting, begun = tiny(wanted.device) if wanted.tiny else full(), time.monotonic()
    device = device_name(setting.device)
    print(f"{device}, PyTorch {torch.__version__}")
    if wanted.tiny:
        print("Tiny sizes, one round: a check of the script, no measurement.")
    result = {"machine": machine(), "tiny": wanted.tiny, "card": device, **run(setting, wanted.minutes)}
    result["seconds"] = round(time.monotonic() - begun, 1)
    path = wanted.output or _path(name, device, wanted.tiny)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nsaved: {path}")
    missed = [] if wanted.tiny else behind(result)
    for text in missed:
        print(f"behind its goal: {text}")
    return int(bool(missed))


def card_key(card: str) -> str:
    """Return a card's result folder: the first word in its name with a digit, such as h100."""
    words = re.findall(r"\w+", card.lower())
    return next((word for word in words if re.search(r"\d", word)), words[0])


def _path(name: str, card: str, tiny: bool) -> Path:
    # A dry run is no result.
    folder = Path(tempfile.mkdtemp()) if tiny else RESULTS / card_key(card)
    return folder / f"{name}.json"

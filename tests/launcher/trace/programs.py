"""Known programs on fake CUDA tensors, run under PyTorch's CUDA build: ``python -m tests.launcher.trace.programs``."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from launcher.trace.link_traffic import Links
from launcher.trace.recorder import Recorder, StoppedAtWaitError

KIB = 1024


def record(program: Callable[[Recorder], None]) -> Recorder:
    """What a program on the device is seen to do."""
    recorder = Recorder(Links(0, 8))
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        program(recorder)
    return recorder


def live_bytes() -> dict[str, int]:
    """A product, its view, a sum in place and a freed temporary."""
    seen = {}

    def program(recorder: Recorder) -> None:
        a = torch.zeros(16, 16, device="cuda")  # 1 KiB
        b = a @ a  # 2 KiB
        view = b[3:].t()
        view += 1
        seen["before"] = recorder.live.now
        c = torch.exp(b)  # 3 KiB
        del b
        seen["view holds"] = recorder.live.now
        del view
        seen["view gone"] = recorder.live.now
        d = torch.zeros(2, 16, 16, device="cuda")  # 4 KiB
        seen["after"] = recorder.live.now
        del a, c, d

    recorder = record(program)
    return {**seen, "end": recorder.live.now, "peak": recorder.live.peak, "peak at": recorder.live.peak_operator}


def waits() -> dict[str, Any]:
    """Every way to wait, each planted once; and what is none."""
    on_host = torch.tensor([1, 2])

    def found(program: Callable[[torch.Tensor], Any]) -> list[str]:
        def on_device(_: Recorder) -> None:
            x = torch.zeros(4, 4, device="cuda")
            with contextlib.suppress(StoppedAtWaitError):
                program(x)

        return [wait.operator for wait in record(on_device).waits.found]

    def element(x: torch.Tensor) -> None:
        x[0, 0] = 3

    def row(x: torch.Tensor) -> None:
        x[0] = 3

    def offload(x: torch.Tensor, *, pinned: bool) -> None:
        host = torch.empty(x.shape, pin_memory=pinned) if pinned else torch.empty_like(x, device="cpu")
        x.copy_(host.copy_(x, non_blocking=True), non_blocking=True)

    return {
        "item": found(lambda x: x.sum().item()),
        "tolist": found(lambda x: x.tolist()),
        "bool": found(lambda x: bool((x > 0).any())),
        "nonzero": found(lambda x: x.nonzero()),
        "mask": found(lambda x: x[x > 0]),
        "list index": found(lambda x: x[[1, 2]]),
        "host index": found(lambda x: x[on_host]),
        "tensor on device": found(lambda x: torch.tensor([1.0, 2.0], device=x.device)),
        "to device": found(lambda x: on_host.to(x.device)),
        "to host": found(lambda x: x.cpu()),
        "to memory that is not pinned": found(lambda x: offload(x, pinned=False)),
        "element": found(element),
        "none: row": found(row),
        "none: non-blocking": found(lambda x: on_host.to(x.device, non_blocking=True)),
        "none: to pinned memory and back": found(lambda x: offload(x, pinned=True)),
        "none: number": found(lambda x: x * 3 + torch.tensor(2.0)),
        "none: host alone": found(lambda x: on_host.sum().item()),
    }


if __name__ == "__main__":
    results = {f.__name__: f() for f in (live_bytes, waits)}
    sys.stdout.write(json.dumps(results) + "\n")

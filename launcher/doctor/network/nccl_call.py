"""A tiny call of NCCL on a GPU, for what NCCL then says of the network.

NCCL may hang where a port is blocked, and nothing ends such a call. So it is made in a thread that nobody has to wait
for; the process ends without it.
"""

from __future__ import annotations

import os
import tempfile
import threading
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.doctor.finding import first_line
from launcher.doctor.network.nccl import parse_log
from parallel.comm.groups import warm, world_group

START_SECONDS = 60.0
"""For NCCL to load, and for its ranks to find each other."""


class NcclCall:
    """NCCL on one GPU of this process, once."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, gpu: int) -> None:
        """``store`` is shared by ``world_size`` ranks, of which each has a GPU of its own, here number ``gpu``."""
        self._store, self._rank, self._world_size = store, rank, world_size
        self._device = torch.device("cuda", gpu)
        self._problem = ""

    def run(self) -> dict[str, Any]:
        """NCCL's network and what went wrong, as plain values."""
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "nccl"
            # Read by NCCL when it is first used. What the user has it say goes to the same file, and is not needed.
            os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(log))
            thread = threading.Thread(target=self._work, name="nccl", daemon=True)
            thread.start()
            thread.join(START_SECONDS)
            if thread.is_alive():
                self._problem = f"NCCL hangs: its ranks do not find each other within {START_SECONDS:.0f} s"
            network = None
            if log.exists():
                network = parse_log(log.read_text(errors="replace"))
        told = {"problem": self._problem, "network": None}
        if network is not None:
            told["network"] = asdict(network)
        return told

    def _work(self) -> None:
        try:
            # A thread has a current device of its own.
            torch.cuda.set_device(self._device)
            dist.init_process_group(
                "nccl",
                store=self._store,
                rank=self._rank,
                world_size=self._world_size,
                timeout=timedelta(seconds=START_SECONDS),
            )
            warm(world_group())
            # The sum is only queued so far: NCCL may still be looking for its ranks.
            torch.cuda.synchronize(self._device)
        except Exception as error:
            # Also faults of libraries: what they say is all that there is to tell.
            self._problem = first_line(error)

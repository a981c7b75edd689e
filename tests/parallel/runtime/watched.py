"""Ranks under the watch, each a process that knows nothing of torch and starts in a tenth of a second."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import REPOSITORY

SECONDS = 120.0
"""Far more than an end takes: a slow machine starts processes slowly, too."""
STARTED: list[subprocess.Popen] = []
"""To be killed after a test: those that block hear nothing else."""


@dataclass
class Ended:
    """How the ranks of one run ended."""

    codes: list[int]
    said: list[str]
    """What each rank wrote."""


class Ranks:
    """Ranks under the watch, each a process; ``acts`` are what they do."""

    def __init__(self, folder: Path, acts: Sequence[str | None], environment: Mapping[str, str] | None = None) -> None:
        """None of ``acts`` is a rank that never comes."""
        self.folder = folder
        folder.mkdir(exist_ok=True)
        shared = {
            "WORLD_SIZE": str(len(acts)),
            "LOCAL_SIZE": str(len(acts)),
            "MASTER_ADDR": "127.0.0.1",
            "PYTHONPATH": str(REPOSITORY),
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("watched_rank.py")), str(folder), act],
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **(environment or {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, act in enumerate(acts)
            if act is not None
        ]
        STARTED.extend(self.processes)

    def wait_until_met(self) -> None:
        """Return once all ranks are about to act."""
        deadline = time.monotonic() + SECONDS
        while len(list(self.folder.glob("here_*"))) < len(self.processes):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)

    def wait(self) -> Ended:
        """Wait for the end of all."""
        said = [process.communicate(timeout=SECONDS)[0] for process in self.processes]
        return Ended([process.returncode for process in self.processes], said)

"""How much memory a piece of work takes, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers import REPOSITORY

# Not ru_maxrss: a new process begins with the peak of the one that started it.
_MEASURE = """
from pathlib import Path

def kib(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])

def begin():
    global before
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = kib("VmRSS")

def growth():
    return (kib("VmHWM") - before) * 1024
"""


def run_measured(script: str, *arguments: object) -> str:
    """What a script prints that calls ``begin`` and, for the bytes that resident memory rose by since, ``growth``."""
    command = [sys.executable, "-c", _MEASURE + script, *map(str, arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout

"""Inputs that grow, each read in a process of its own: what comes of it, and what it takes of memory and time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.bounded import check_screen
from tests.helpers import REPOSITORY

MOST_MIB = 600.0
"""Any of the inputs, beyond what Python and its libraries take: 64 MiB that a file may become are in memory once as
pieces, once joined, once as text and once in zstandard's own buffers; a parsed record of 4 million values takes 350."""
MOST_FLOORS = 100.0
"""Processor time of any of the inputs, over that of a million small objects in the same process: others use the machine
too, and machines differ. The longest take 12 s, where the objects take 0.3."""
_LIMIT_BYTES = 12 << 30
_SCRIPT = """
import json, resource, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
{imports}

def kib(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])

path = Path(sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")
before, begin = kib("VmRSS"), time.process_time()
try:
    outcome = action(path)
except LongCtxError as error:
    outcome = f"DataError: {{error}}"
seconds, peak = time.process_time() - begin, kib("VmHWM")
begin = time.process_time()
for number in range(1_000_000):
    str((number, number))
print(json.dumps([outcome, (peak - before) / 1024, seconds, time.process_time() - begin]))
"""


@dataclass(frozen=True)
class Outcome:
    """What came of an input."""

    said: str
    mib: float
    seconds: float
    floor_seconds: float


def grow(name: str, path: Path, imports: str, *, most_mib: float = MOST_MIB) -> Outcome:
    """Return what comes of the input; AssertionError where it takes too much, or says more than a screen.

    ``imports`` defines ``action(path)`` and imports LongCtxError. A line is added to the file $GROWTH_TABLE.
    """
    script = _SCRIPT.format(limit=_LIMIT_BYTES, imports=imports)
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    outcome = Outcome(*json.loads(done.stdout.splitlines()[-1]))
    if table := os.environ.get("GROWTH_TABLE"):
        said = " ".join(outcome.said.replace(str(path), path.name).split())[:110]
        with Path(table).open("a") as file:
            file.write(f"| {name} | {path.stat().st_size:,} | {said} | {outcome.mib:.0f} | {outcome.seconds:.2f} |\n")
    check_screen(outcome.said)
    assert outcome.mib < most_mib, outcome
    assert outcome.seconds < MOST_FLOORS * outcome.floor_seconds, outcome
    return outcome

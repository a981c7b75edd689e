"""PyTorch's CUDA code on fake tensors: shapes, dtypes, strides and host waits of real operators, without a GPU.

Needs a Python whose PyTorch is built for CUDA (``tests/cuda_builds.py``). Where there is no driver ``plan --trace``'s
stand-in takes its place.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from tests.helpers import REPOSITORY

# PyTorch would tidy up devices that are none at the end of the process, and aborts once in a while.
_PROGRAM = """
import os, runpy, sys
from launcher.trace.stand_in import has_driver, load_stand_in
if not has_driver():
    load_stand_in()()
sys.argv[0] = sys.argv.pop(1)
runpy.run_module(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)
"""


def run_on_fake_cuda(module: str, *arguments: str, python: str, timeout: int = 240, **environment: str) -> str:
    """What ``python -m module`` prints on fake CUDA devices; the test fails where it does."""
    run = subprocess.run(
        [python, "-W", "ignore", "-c", _PROGRAM, module, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=REPOSITORY,
        env=variables(**environment),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def json_on_fake_cuda(python: str, module: str, *arguments: str) -> Any:
    """The JSON that ``python -m module`` prints in its last line."""
    return json.loads(run_on_fake_cuda(module, *arguments, python=python, timeout=580).splitlines()[-1])


def variables(**more: str) -> dict[str, str]:
    """The environment of a process under the CUDA build."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **more}

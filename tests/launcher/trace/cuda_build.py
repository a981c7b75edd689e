"""Runs functions of a test module under PyTorch's CUDA build, which the tests' own interpreter may not have."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from tests.helpers import REPOSITORY


def under_cuda_build(python: str, module: str, *arguments: str) -> Any:
    """The JSON that ``python -m module`` prints in its last line."""
    command = [python, "-m", module, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def environment() -> dict[str, str]:
    """The environment of a process under the CUDA build."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}

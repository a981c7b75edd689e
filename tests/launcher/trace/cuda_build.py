"""Runs functions of a test module under PyTorch's CUDA build, which the tests' own interpreter may not have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.helpers import REPOSITORY

VARIABLE = "LONGCTX_CUDA_PYTHON"


@cache
def cuda_python() -> str | None:
    """An interpreter whose PyTorch is built for CUDA; no GPU is needed."""
    from launcher.trace.stand_in import torch_cuda_version

    if named := os.environ.get(VARIABLE):
        return named
    if torch_cuda_version() is not None:
        return sys.executable
    return None


def need_cuda_build() -> str:
    """The interpreter; skips the test, loudly, where there is none."""
    python = cuda_python()
    if python is None:
        pytest.skip(
            f"{VARIABLE} is not set and this PyTorch is a CPU build: NOTHING IS TRACED. Set it to a Python whose "
            "PyTorch is built for CUDA."
        )
    return python


def under_cuda_build(module: str, *arguments: str) -> Any:
    """The JSON that ``python -m module`` prints in its last line."""
    command = [need_cuda_build(), "-m", module, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def environment() -> dict[str, str]:
    """The environment of a process under the CUDA build."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}

"""Interpreters whose PyTorch is built for CUDA: this one, or those that ``LONGCTX_CUDA_PYTHON`` names, ``:`` between.

Tests that take the fixture ``cuda_python`` run once under each of them. They need no GPU.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from launcher.trace.stand_in import torch_cuda_version

VARIABLE = "LONGCTX_CUDA_PYTHON"


def cuda_builds(variable: str = VARIABLE) -> list:
    """Return a parameter for each interpreter; one that is missing, or none at all, skips its test and says so."""
    named = [name for name in os.environ.get(variable, "").split(os.pathsep) if name]
    if named:
        return [_named(python, variable) for python in named]
    if variable == VARIABLE and torch_cuda_version() is not None:
        return [pytest.param(sys.executable, id="this")]
    reason = f"{variable} names no Python whose PyTorch is built for CUDA: CUDA code is NOT tested without a GPU"
    return [pytest.param("", id="none", marks=pytest.mark.skip(reason=reason))]


def _named(python: str, variable: str) -> object:
    name = Path(python).absolute().parent.parent.name  # the environment's folder
    if shutil.which(python):
        return pytest.param(python, id=name)
    reason = f"{variable} names {python}, which is not there: CUDA code is NOT tested under it"
    return pytest.param(python, id=name, marks=pytest.mark.skip(reason=reason))

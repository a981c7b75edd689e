"""PyTorch's CUDA code on fake tensors: shapes, dtypes, strides and host waits of real operators, without a GPU.

Needs a Python whose PyTorch is built for CUDA (``tests/cuda_builds.py``). Where there is no driver two stubs take its
place, compiled here: a ``libcuda.so.1`` that answers the one call which autograd makes, and a preloaded library that
counts devices once PyTorch has settled for doing without.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

_LIBCUDA = """
int cuDevicePrimaryCtxGetState(int device, unsigned int *flags, int *active) { *flags = 0; *active = 0; return 0; }
"""
_DEVICES = """
static signed char count = 0;
void set_fake_cuda_devices(int n) { count = (signed char)n; }
signed char _ZN3c104cuda12device_countEv(void) { return count; }
_Bool _ZN3c104cuda17hasPrimaryContextEa(signed char device) { (void)device; return 0; }
"""


# PyTorch would tidy up devices that are none at the end of the process, and aborts once in a while.
_PROGRAM = """
import os, runpy, sys
sys.argv[0] = sys.argv.pop(1)
runpy.run_module(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)
"""


def run_on_fake_cuda(module: str, cache: Path, *arguments: str, python: str, timeout: int = 240, **environment) -> str:
    """What ``python -m module`` prints on fake CUDA devices; the test fails where it does."""
    variables = dict(os.environ) | environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        variables |= _stubs(cache)
    run = subprocess.run(
        [python, "-W", "ignore", "-c", _PROGRAM, module, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=ROOT,
        env=variables,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def _stubs(cache: Path) -> dict[str, str]:
    """The environment that puts the two stubs in place of a driver."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in of the driver: NOT tested on fake CUDA tensors")
    for name, source, options in (
        ("libcuda.so.1", _LIBCUDA, ["-Wl,-soname,libcuda.so.1"]),
        ("libdevices.so", _DEVICES, []),
    ):
        if not (cache / name).exists():
            code = cache / f"{name}.c"
            code.write_text(source)
            subprocess.run([compiler, "-shared", "-fPIC", *options, "-o", cache / name, code], check=True)
    devices = str(cache / "libdevices.so")
    paths = f"{cache}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    return {"LONGCTX_FAKE_CUDA": devices, "LD_PRELOAD": devices, "LD_LIBRARY_PATH": paths}

"""Driver stand-in for PyTorch's CUDA build on a machine without one: it answers autograd's two queries.

Tensors without data need no GPU, but autograd asks for the number of devices and whether they are in use. If there is a
driver, the stand-in is not loaded. It must be loaded before torch is imported, so this file does not import torch.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from longctx.errors import LongCtxError

_SOURCE = """\
static signed char devices = 0;
void longctx_set_devices(int n) { devices = (signed char)n; }
/* c10::cuda::device_count() and c10::cuda::hasPrimaryContext(signed char) */
signed char _ZN3c104cuda12device_countEv(void) { return devices; }
_Bool _ZN3c104cuda17hasPrimaryContextEa(signed char device) { (void)device; return 0; }
/* the driver's own: no device is in use */
int cuDevicePrimaryCtxGetState(int device, unsigned int *flags, int *active) { *flags = 0; *active = 0; return 0; }
"""
_DRIVER = "libcuda.so.1"
_MANY_DEVICES = 64
"""Larger than any device index that autograd queries."""


def torch_cuda_version() -> str | None:
    """Return the CUDA version that the installed PyTorch was built for; None for a CPU build. Imports no torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    # PyTorch's build writes this file, which contains only assignments.
    values: dict[str, object] = {}
    exec((Path(spec.origin).parent / "version.py").read_text(), values)
    version = values.get("cuda")
    if version is None:
        return None
    return str(version)


def has_driver() -> bool:
    """Return True if this machine has NVIDIA's driver."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def load_stand_in() -> Callable[[], None]:
    """Load the stand-in; return a function to call after importing torch.

    Raise LongCtxError if it cannot be compiled.
    """
    # RTLD_GLOBAL, and before torch: torch's libraries then find these symbols before their own. The library has the
    # driver's name, so torch finds it when it looks for the driver.
    library = ctypes.CDLL(str(_compiled()), ctypes.RTLD_GLOBAL)

    def finish() -> None:
        import torch

        # While the device count is 0, PyTorch installs its no-op guard.
        torch._C._ensureCUDADeviceGuardSet()  # type: ignore[attr-defined]
        library.longctx_set_devices(_MANY_DEVICES)
        # Otherwise tensors without data would create a context on the device.
        torch.cuda.is_available = lambda: False

    return finish


def _compiled() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longctx"
    path = folder / f"driver-stand-in-{hashlib.sha256(_SOURCE.encode()).hexdigest()[:12]}.so"
    # The name includes the source's hash, so a cached build is current.
    if path.exists():
        return path
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise LongCtxError(
            "plan --trace: this machine has no NVIDIA driver, and the C stub that replaces it needs a C compiler "
            "(cc, gcc or clang).\nInstall one, such as `apt install gcc`, or trace on a machine with a driver."
        )
    folder.mkdir(parents=True, exist_ok=True)
    # Compile to a temporary name: another process may compile it at the same time.
    draft = folder / f"{path.name}.{os.getpid()}"
    command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{_DRIVER}", "-x", "c", "-", "-o", str(draft)]
    done = subprocess.run(command, input=_SOURCE, text=True, capture_output=True)
    if done.returncode:
        raise LongCtxError(f"plan --trace: {' '.join(command)} failed:\n{done.stderr.strip()}")
    draft.replace(path)
    return path

"""Import this before anything touches CUDA, in a process that ``run_on_fake_cuda`` started."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

if "LONGCTX_FAKE_CUDA" in os.environ:
    # while no device is counted autograd takes the guard that does nothing; then there are devices
    torch._C._ensureCUDADeviceGuardSet()
    ctypes.CDLL(os.environ["LONGCTX_FAKE_CUDA"]).set_fake_cuda_devices(8)
    torch.cuda.is_available = lambda: False  # fake tensors make no context then


def say(*words: object) -> None:
    """Write a line for the test that started this process."""
    sys.stdout.write(" ".join(str(word) for word in words) + "\n")

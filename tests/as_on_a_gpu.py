"""The arithmetic that a GPU takes, on tensors of a CPU: its branches run by their own code, compared with float64."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from longctx.kernels import devices


@contextmanager
def computing_as_on_a_gpu() -> Iterator[None]:
    """Answer no to the question of every module whether a tensor is on the CPU."""
    asked = devices.on_cpu
    with pytest.MonkeyPatch.context() as patch:
        for module in list(sys.modules.values()):
            if getattr(module, "on_cpu", None) is asked:
                patch.setattr(module, "on_cpu", lambda x: False)
        yield

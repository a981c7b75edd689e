"""``LiveBytes``: live device memory, its peak, and the operator and code line at the peak."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
"""Folder with the four packages."""
_PACKAGES = tuple(f"{ROOT / name}/" for name in ("longctx", "parallel", "data_pipeline", "launcher"))
_OTHERS = (f"{Path(__file__).resolve().parent}/", f"{ROOT}/parallel/comm/communicator.py")
"""Skipped callers: the tracer itself, and the communicator, which receives for its caller."""


def current_place() -> str:
    """Return ``file:line`` for the innermost running function in our packages; empty if there is none.

    No such function is running while autograd computes one of PyTorch's own gradients.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGES) and not file.startswith(_OTHERS):
            return f"{file.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class LiveBytes:
    """Counter for live storages created by operators. A storage that several tensors share counts once."""

    def __init__(self, device_type: str = "cuda") -> None:
        """Count storages on this device type."""
        self.now = self.peak = 0
        self.peak_operator = ""
        """Operator that produced the peak."""
        self.peak_place = ""
        """Code line at the peak; empty inside PyTorch's own gradients."""
        self._device_type = device_type
        self._sizes: dict[int, int] = {}

    def ignore(self, *tensors: Tensor) -> None:
        """Exclude these existing tensors."""
        for x in tensors:
            # With size 0, their release does not reduce the live bytes.
            self._sizes[x.untyped_storage()._cdata] = 0

    def restart_peak(self) -> None:
        """Reset the peak to the bytes that are live now."""
        self.peak, self.peak_operator, self.peak_place = self.now, "", ""

    def contains(self, tensor: Tensor) -> bool:
        """Return True if the tensor's storage is counted."""
        return tensor.untyped_storage()._cdata in self._sizes

    def see(self, operator: str, results: Any, *, inside: int = 0) -> None:
        """Count an operator's results, and the bytes that it held ``inside`` in addition to them."""
        for leaf in tree_leaves(results):
            if isinstance(leaf, Tensor) and leaf.device.type == self._device_type:
                self._add(operator, leaf)
        self._note_peak(operator, inside)

    def _add(self, operator: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        # A view, or a result written into known memory, adds no bytes.
        if key in self._sizes:
            return
        # Python keeps one storage object for as long as the storage lives, so its finalizer marks the end of the
        # memory.
        self._sizes[key] = storage.nbytes()
        weakref.finalize(storage, self._gone, key)
        self.now += storage.nbytes()
        self._note_peak(operator, 0)

    def _note_peak(self, operator: str, inside: int) -> None:
        if self.now + inside > self.peak:
            self.peak, self.peak_operator, self.peak_place = self.now + inside, operator, current_place()

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)

"""Visit and the Transport protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from longctx.model.attention.strided import Strided


class Visit(NamedTuple):
    """Keys that a rank meets, and what it computes with them."""

    keys_BsKD: Tensor
    values_BsKV: Tensor
    queries: slice
    """Query rows with work."""
    slices: Tensor
    """The work, a ``slice_table``; query rows count from the start of ``queries``."""
    strided: tuple[Strided, ...] = ()
    """What a stride adds to it."""


class Transport(Protocol):
    """Shows keys and values to a computation."""

    def run(self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[Visit], None]) -> None:
        """Call ``compute`` for each visit, the rank's own keys first."""
        ...

    def run_backward(
        self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[Visit], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Call ``compute`` for the gradients of each visit's keys and values; dK and dV of the rank's own rows."""
        ...

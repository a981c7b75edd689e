"""An update that is left out: what ZeRO does about a norm that is not finite, done about any norm that we refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.runtime.bf16_optimizer as bf16_optimizer
import deepspeed.runtime.zero.stage3 as stage3
import deepspeed.runtime.zero.stage_1_and_2 as stage_1_and_2
from deepspeed.runtime.utils import is_invalid_grad_norm

Accept = Callable[[float], bool]
"""Whether to update by a gradient of this norm, which is finite: the same answer on every rank, however often asked."""

_OPTIMIZERS = (stage_1_and_2, stage3, bf16_optimizer)
"""Each asks this of the norm over all ranks, before it clips, updates or counts a step; or it clears the gradients."""
_ASKED = is_invalid_grad_norm.__name__


class Seen:
    """What an update saw."""

    norm: float | None = None
    """The gradient's norm; None where it was not finite."""


def everything(norm: float) -> bool:
    """Accept any norm."""
    return True


@contextmanager
def refusing(accept: Accept) -> Iterator[Seen]:
    """Within it, ZeRO's optimisers leave out an update by a norm that ``accept`` refuses, and clear the gradients."""
    seen = Seen()

    def is_invalid(norm: Any) -> bool:
        if is_invalid_grad_norm(norm):
            return True
        seen.norm = float(norm)
        return not accept(seen.norm)

    for module in _OPTIMIZERS:
        setattr(module, _ASKED, is_invalid)
    try:
        yield seen
    finally:
        for module in _OPTIMIZERS:
            setattr(module, _ASKED, is_invalid_grad_norm)

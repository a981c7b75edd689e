"""What torch.compile leaves outside its graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")


def outside_graphs(reason: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function that torch.compile must leave as it is: each call of it is a graph break.

    ``reason`` is what PyTorch's logs say about the break.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        return cast(Callable[P, T], torch.compiler.disable(function, reason=reason))

    return decorate

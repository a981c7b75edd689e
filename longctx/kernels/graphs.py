"""What torch.compile leaves outside its graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")


T = TypeVar("T")


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which torch.compile leaves as it is: one graph break a layer."""
    return cast(Callable[P, T], torch.compiler.disable(function))

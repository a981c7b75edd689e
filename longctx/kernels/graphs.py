"""Functions that torch.compile leaves outside its graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that torch.compile must leave as it is: each call of it is a graph break.

    Unlike ``torch.compiler.disable``, it does not import the tracer at decoration, which takes a second of every start.
    """
    left_out = torch._disable_dynamo(function)  # imports it when it is called

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return left_out(*args, **kwargs)
        return function(*args, **kwargs)

    return call

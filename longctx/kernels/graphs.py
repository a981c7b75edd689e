"""Decorator that keeps a function outside torch.compile graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def exclude_from_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that torch.compile must not trace: each call is a graph break."""
    # ``torch.compiler.disable`` would import the tracer at decoration, which adds a second to every start
    left_out = torch._disable_dynamo(function)  # imports the tracer on first call

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return left_out(*args, **kwargs)
        return function(*args, **kwargs)

    return call

"""What torch.compile leaves outside its graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that torch.compile must leave as it is: each call of it is a graph break.

    Unlike ``torch.compiler.disable``, which imports the tracer where it decorates: a second of every start.
    """
    left_out = torch._disable_dynamo(function)  # imports it when it is called

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        chosen = function
        if torch.compiler.is_compiling():
            chosen = left_out
        return chosen(*args, **kwargs)

    # The tracer counts what it compiles by code object, and gives up at eight: each function gets one of its own.
    outer = cast(FunctionType, call)
    outer.__code__ = outer.__code__.replace(co_name=function.__name__)
    return call

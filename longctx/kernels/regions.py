"""``Regions``: the parts of a training step that ``torch.compile`` compiles to one graph each.

A region is the code between two things that no graph can hold: the attention core, whose work depends on the documents
of each batch, the experts, and ZeRO-3's hooks. A region takes tensors and constants, so other documents do not compile
it again; its number of tokens is dynamic from the first call on.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Run(Protocol):
    """Caller of a block's functions: eager or compiled."""

    def __call__(self, function: Callable[..., Any], *args: Any, tokens_dim: int = 1) -> Any:
        """Return ``function(*args)``; ``tokens_dim`` is the dim of the tokens in all tensors among the arguments."""
        ...


class CompileCount(NamedTuple):
    """Graphs that this process has compiled so far, and the time it took."""

    graphs: int
    seconds: float
    """Backward graphs' too, which are compiled when backward first meets them."""


def call_function(function: Callable[..., Any], *args: Any, tokens_dim: int = 1) -> Any:
    """Return ``function(*args)``, without compiling it."""
    return function(*args)


def run_with(compiler: str | None) -> Run:
    """Return the caller of a model's regions: compiled with a compiler's backend, eager with None."""
    if compiler is None:
        return call_function
    return Regions(compiler)


class Regions:
    """Caller that compiles functions, each once for each structure of its arguments, whatever their lengths.

    A function must return its results and not write to an argument: that may be a copy, and the write would be lost.
    """

    def __init__(self, backend: str = "inductor") -> None:
        """Set the backend of ``torch.compile``."""
        self._backend = backend
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def __call__(self, function: Callable[..., Any], *args: Any, tokens_dim: int = 1) -> Any:
        """Return ``function(*args)``; ``tokens_dim`` is the dim of the tokens in all tensors among the arguments.

        Raise AssertionError if the function writes to one of them.
        """
        if function not in self._compiled:
            self._compiled[function] = self._compile(function)
        args = tuple(_laid_out_alike(arg) for arg in args)
        tensors = list(_tensors(args))
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, tokens_dim)
        versions = [tensor._version for tensor in tensors]
        result = self._compiled[function](*args)
        written = versions != [tensor._version for tensor in tensors]
        assert not written, f"{function.__name__} writes to an argument, which may be a copy: return it instead"
        return result

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # The tracer counts compilations by code object, and gives up at eight: each decoder has its own.
        assert isinstance(function, FunctionType)
        own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
        # fullgraph: a part that no graph can hold is an error, and never silently slow
        return torch.compile(own, backend=self._backend, fullgraph=True, dynamic=None)


def compile_count() -> CompileCount:
    """Return the graphs and the time of ``torch.compile`` in this process."""
    from torch._dynamo.utils import calculate_time_spent, counters  # imported by now, if anything is compiled

    return CompileCount(counters["stats"]["unique_graphs"], calculate_time_spent()["total_wall_time"])


def missing_for_compiling(device_type: str) -> str | None:
    """Return the requirement of ``torch.compile`` on this device that is missing, in words; None if all are met."""
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's header files are missing (python3-dev)"
    if device_type == "cuda":
        if find_spec("triton") is None:
            return "Triton is missing (pip install triton)"
        # Triton builds the code that launches a kernel.
        if not any(shutil.which(name) for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name):
            return "there is no C compiler (gcc)"
        return None
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        return f"there is no C++ compiler ({name})"
    return None


def _laid_out_alike(arg: Any) -> Any:
    """Return a contiguous copy of a tensor that is not contiguous, or is a view of one that is not.

    A graph is specialized on strides, and those of a part change with the full tensor. Anything else is returned as it
    is.
    """
    if not isinstance(arg, Tensor):
        return arg
    if not arg.is_contiguous():
        return arg.clone(memory_format=torch.contiguous_format)
    if arg._base is None or arg._base.is_contiguous():
        return arg
    # A graph is also specialized on whether its input is a view.
    return arg.clone().view(arg.shape)


def _tensors(args: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments, and in tuples among them."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, tuple):
            yield from _tensors(arg)

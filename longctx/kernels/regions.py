"""``Regions``: parts of a training step that ``torch.compile`` compiles to one graph each.

A region is the code between two graph breaks: the attention core, whose work depends on each batch's documents, the
experts, and ZeRO-3's hooks. A region takes tensors and constants, so other documents do not recompile it; its token
count is dynamic from the first call on.
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


class RegionRunner(Protocol):
    """Callable that runs a block's functions: eager or compiled."""

    def __call__(self, function: Callable[..., Any], *args: Any, tokens_dim: int = 1) -> Any:
        """Return ``function(*args)``; ``tokens_dim`` is the token dim in all tensors among the arguments."""
        ...


class CompileCount(NamedTuple):
    """Graphs this process has compiled so far, and the time spent."""

    graphs: int
    seconds: float
    """Includes backward graphs, which compile on the first backward pass."""


def call_function(function: Callable[..., Any], *args: Any, tokens_dim: int = 1) -> Any:
    """Return ``function(*args)``, without compiling it."""
    return function(*args)


def run_with(compiler: str | None) -> RegionRunner:
    """Return the runner for a model's regions: compiled with this backend, or eager without one."""
    if compiler is None:
        return call_function
    return Regions(compiler)


class Regions:
    """Runner that compiles each function once per argument structure, for any lengths.

    A function must return its results and never write to an argument: that may be a copy, and the write would be lost.
    """

    def __init__(self, backend: str = "inductor") -> None:
        """Set the ``torch.compile`` backend."""
        self._backend = backend
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def __call__(self, function: Callable[..., Any], *args: Any, tokens_dim: int = 1) -> Any:
        """Return ``function(*args)``; ``tokens_dim`` is the token dim in all tensors among the arguments.

        Raise AssertionError if the function writes to one.
        """
        if function not in self._compiled:
            self._compiled[function] = self._compile(function)
        args = tuple(_contiguous_arg(arg) for arg in args)
        tensors = list(_tensors(args))
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, tokens_dim)
        versions = [tensor._version for tensor in tensors]
        result = self._compiled[function](*args)
        written = versions != [tensor._version for tensor in tensors]
        assert not written, f"{function.__name__} writes to an argument, which may be a copy: return it instead"
        return result

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # The tracer counts compilations per code object and gives up after eight, so each decoder gets its own code
        # object.
        assert isinstance(function, FunctionType)
        own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
        # fullgraph: a graph break is an error, never a silent slowdown
        return torch.compile(own, backend=self._backend, fullgraph=True, dynamic=None)


def compile_count() -> CompileCount:
    """Return this process's ``torch.compile`` graph count and time."""
    from torch._dynamo.utils import calculate_time_spent, counters  # imported already if anything was compiled

    return CompileCount(counters["stats"]["unique_graphs"], calculate_time_spent()["total_wall_time"])


def missing_for_compiling(device_type: str) -> str | None:
    """Describe the missing ``torch.compile`` requirement on this device, if any."""
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's header files are missing (python3-dev)"
    if device_type == "cuda":
        if find_spec("triton") is None:
            return "Triton is missing (pip install triton)"
        # Triton compiles its kernel launcher
        if not any(shutil.which(name) for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name):
            return "a C compiler is missing (gcc)"
        return None
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        return f"a C++ compiler is missing ({name})"
    return None


def _contiguous_arg(arg: Any) -> Any:
    """Return a contiguous copy if a tensor or its base is not contiguous; return anything else unchanged."""
    # graphs are specialized on strides, and a view's strides change with the full tensor
    if not isinstance(arg, Tensor):
        return arg
    if not arg.is_contiguous():
        return arg.clone(memory_format=torch.contiguous_format)
    if arg._base is None or arg._base.is_contiguous():
        return arg
    # a graph is also specialized on whether its input is a view
    return arg.clone().view(arg.shape)


def _tensors(args: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments, and in tuples among them."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, tuple):
            yield from _tensors(arg)

"""``Regions``: the parts of a training step that ``torch.compile`` makes one graph each of.

A region is what lies between two things that no graph can hold: the attention core, whose work is other documents'
each time, the experts, and ZeRO-3's hooks. A region takes tensors and constants, so other documents are no reason to
compile again; its number of tokens is dynamic from the first call on.
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
    """How a function of a block is called: as it is, or compiled."""

    def __call__(self, function: Callable[..., Any], *args: Any, tokens_dim: int = 1) -> Any:
        """``function(*args)``; all tensors among the arguments have the tokens as this dim."""
        ...


class CompileCount(NamedTuple):
    """What this process has compiled so far."""

    graphs: int
    seconds: float
    """Backward graphs' too, which are compiled when backward first meets them."""


def call_function(function: Callable[..., Any], *args: Any, tokens_dim: int = 1) -> Any:
    """``function(*args)``, as it is."""
    return function(*args)


def run_with(compiler: str | None) -> Run:
    """How a model calls its regions: with a compiler's backend compiled, with None as they are."""
    if compiler is None:
        return call_function
    return Regions(compiler)


class Regions:
    """Calls functions compiled, each compiled once for each structure of its arguments, whatever their lengths.

    A function returns what it makes and writes to no argument: it may be handed a copy, where a write would be lost.
    """

    def __init__(self, backend: str = "inductor") -> None:
        """``backend`` is ``torch.compile``'s."""
        self._backend = backend
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def __call__(self, function: Callable[..., Any], *args: Any, tokens_dim: int = 1) -> Any:
        """``function(*args)``; all tensors among the arguments have the tokens as this dim.

        AssertionError if the function writes to one of them.
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
        # The tracer counts what it compiles by code object, and gives up at eight: each decoder has its own.
        assert isinstance(function, FunctionType)
        own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
        # fullgraph: a part that no graph can hold is an error, and never silently slow
        return torch.compile(own, backend=self._backend, fullgraph=True, dynamic=None)


def compile_count() -> CompileCount:
    """What ``torch.compile`` has done in this process."""
    from torch._dynamo.utils import calculate_time_spent, counters  # imported by now, where anything is compiled

    return CompileCount(counters["stats"]["unique_graphs"], calculate_time_spent()["total_wall_time"])


def missing_for_compiling(device_type: str) -> str | None:
    """What ``torch.compile`` needs for this device and this machine lacks, in words; None where all is there."""
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
    """Return a copy of a tensor whose values do not lie side by side, or of a view of one: a graph is made for strides,
    and those of a part change with the whole. Anything else is returned as it is."""
    if not isinstance(arg, Tensor):
        return arg
    if not arg.is_contiguous():
        return arg.clone(memory_format=torch.contiguous_format)
    if arg._base is None or arg._base.is_contiguous():
        return arg
    # A graph is also made for a view, or for none.
    return arg.clone().view(arg.shape)


def _tensors(args: tuple[Any, ...]) -> Iterator[Tensor]:
    """The tensors among the arguments, and in tuples among them."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, tuple):
            yield from _tensors(arg)

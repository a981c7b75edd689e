"""Repetition of a call, and its results as flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from parallel.audit.adamw import updated
from parallel.audit.call_sample import UPDATE, CallSample


def repeat_call(sample: CallSample, device: torch.device) -> list[Tensor]:
    """Recompute the sample's call on this rank, and return its results."""
    # New memory each time: a call may write to its arguments.
    args, kwargs = sample.call(device)
    # The original call was captured below autograd.
    with torch.no_grad():
        if sample.op == UPDATE:
            return flat_copies(updated(*args, **kwargs))
        return flat_copies(operator(sample.op)(*args, **kwargs))


def operator(name: str) -> Callable[..., Any]:
    """Return the operator for a name from ``name_of``."""
    namespace, rest = name.split("::")
    packet, overload = rest.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def name_of(function: Any) -> str:
    """Return an operator's name and overload: ``aten::mm.default``."""
    return f"{function._schema.name}.{function._overloadname}"


def flat_copies(results: Any) -> list[Tensor]:
    """Return flat copies of all tensors in a result."""
    return [x.detach().clone(memory_format=torch.contiguous_format).flatten() for x in tensors_in(results)]


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results, also inside lists and dicts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)

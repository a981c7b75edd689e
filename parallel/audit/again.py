"""A call made again, and its results as flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from parallel.audit.adamw import updated
from parallel.audit.sample import UPDATE, Sample


def compute_again(sample: Sample, device: torch.device) -> list[Tensor]:
    """The results of the sample's call, computed on this rank."""
    # Memory of its own each time: a call may write to what it is given.
    args, kwargs = sample.call(device)
    # The call stood below autograd.
    with torch.no_grad():
        if sample.op == UPDATE:
            return flat(updated(*args, **kwargs))
        return flat(operator(sample.op)(*args, **kwargs))


def operator(name: str) -> Callable[..., Any]:
    """The operator of a name as ``name_of`` gives it."""
    namespace, rest = name.split("::")
    packet, overload = rest.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def name_of(function: Any) -> str:
    """An operator by name and overload: ``aten::mm.default``."""
    return f"{function._schema.name}.{function._overloadname}"


def flat(results: Any) -> list[Tensor]:
    """Copies of all tensors of a result, flat."""
    return [x.detach().clone(memory_format=torch.contiguous_format).flatten() for x in tensors_in(results)]


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors of arguments or results, also of lists among them."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)

"""Gradients as DeepSpeed holds them, and which tensors are not finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from parallel.comm.communicator import Communicator
from parallel.comm.groups import world_group


def named_gradients(
    decoder: nn.Module,
    groups: Sequence[Sequence[nn.Parameter]],
    gradients: Mapping[int, Sequence[Tensor]] | Sequence[Sequence[Tensor]],
) -> Iterator[tuple[str, Tensor]]:
    """DeepSpeed's gradients by name: for each of its groups of parameters a list of as many, and padding."""
    # By identity: DeepSpeed keeps our parameters, and knows them by no name.
    names = {id(p): name for name, p in decoder.named_parameters()}
    for number, parameters in enumerate(groups):
        parts = [part for part in gradients[number] if not getattr(part, "_zero_padding", False)]
        for p, part in zip(parameters, parts, strict=False):
            yield names[id(p)], part


def not_finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """1 for each tensor that holds a value that is not finite, else 0, on ``device``. No host sync.

    Tensors may lie on several devices.
    """
    filled = []
    for x in tensors:
        if not x.numel():
            x = x.new_zeros(1)  # the largest of nothing is an error
        filled.append(x.detach())
    # The largest absolute value is exact, NaN where there is one, and needs no mask of each tensor.
    largest = torch._foreach_norm(filled, torch.inf, dtype=torch.float32)
    return (~torch.stack([norm.to(device, non_blocking=True) for norm in largest]).isfinite()).to(torch.int32)


def named_on_any_rank(found: Tensor, names: Iterable[str]) -> list[str]:
    """The names whose entry in ``found`` is not 0 on one rank or more. Collective; changes ``found``."""
    Communicator().all_reduce(found, world_group(), doing="looking for gradients that are not finite", largest=True)
    return [name for name, one in zip(names, found.tolist(), strict=True) if one]

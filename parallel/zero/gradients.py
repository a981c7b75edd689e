"""DeepSpeed's gradients: by name, non-finite ones, rejected norms, memory for queued reductions.

With ``overlap_comm`` DeepSpeed queues reductions on its own stream while backward runs, and drops a gradient as soon as
its reduction is queued. PyTorch's allocator knows only the stream on which a tensor was created: it gives the dropped
gradient's memory to backward's next tensor, although the reduction will still read it, and write into it. The invariant
of ``record_queued_gradients``: every tensor that a queued reduction reads or writes has that stream recorded
(``Tensor.record_stream``) before DeepSpeed can drop it, so that its memory is reused only after the reduction.

DeepSpeed 0.19.8 records most gradients. In ``stage_1_and_2.py`` it misses one that is larger than a bucket, on ranks
that own no part of it, if its reduction works on a copy: in another dtype, or with two ranks' parts. In ``stage3.py``
it misses one if this rank's part contains only padding. docs/upstream/deepspeed-zero2-gradient-lifetime.md has the
lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import deepspeed.runtime.bf16_optimizer as bf16_optimizer
import deepspeed.runtime.zero.stage3 as stage3
import deepspeed.runtime.zero.stage_1_and_2 as stage_1_and_2
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import is_invalid_grad_norm
from torch import Tensor, nn

from parallel.comm.communicator import Communicator
from parallel.comm.process_groups import world_group

UpdateCheck = Callable[[float], bool]
"""Decides whether to update with a gradient of this finite norm; same result on every rank and for repeated calls."""

_OPTIMIZERS = (stage_1_and_2, stage3, bf16_optimizer)
"""Each calls this check on the global norm before it clips, updates or counts a step; if invalid, it clears gradients.
"""
_NORM_CHECK = is_invalid_grad_norm.__name__


def named_gradients(
    decoder: nn.Module,
    groups: Sequence[Sequence[nn.Parameter]],
    gradients: Mapping[int, Sequence[Tensor]] | Sequence[Sequence[Tensor]],
) -> Iterator[tuple[str, Tensor]]:
    """Yield DeepSpeed's gradients by name, without padding, given one list per parameter group."""
    # By identity: DeepSpeed keeps our parameters, but not their names.
    names = {id(p): name for name, p in decoder.named_parameters()}
    for number, parameters in enumerate(groups):
        parts = [part for part in gradients[number] if not getattr(part, "_zero_padding", False)]
        for p, part in zip(parameters, parts, strict=False):
            yield names[id(p)], part


def not_finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return 1 per tensor with a non-finite value, otherwise 0, on ``device``. No host sync.

    Tensors may be on several devices. A quantized weight's bytes count as finite.
    """
    filled = []
    for x in tensors:
        # The maximum over an empty tensor is an error.
        if not x.numel() or not x.is_floating_point():
            x = torch.zeros(1, device=x.device)
        filled.append(x.detach())
    # The inf norm is exact, propagates NaN, and needs no mask per tensor.
    largest = torch._foreach_norm(filled, torch.inf, dtype=torch.float32)
    return (~torch.stack([norm.to(device, non_blocking=True) for norm in largest]).isfinite()).to(torch.int32)


def named_on_any_rank(found: Tensor, names: Iterable[str]) -> list[str]:
    """Return the names flagged in ``found`` on any rank. Collective; overwrites ``found``."""
    Communicator().all_reduce(found, world_group(), operation="checking for non-finite gradients", largest=True)
    return [name for name, one in zip(names, found.tolist(), strict=True) if one]


class SeenNorm:
    """Gradient norm that an update saw."""

    norm: float | None = None
    """Norm; None if it was not finite."""


def always_update(norm: float) -> bool:
    """Accept any norm."""
    return True


@contextmanager
def refusing(should_update: UpdateCheck) -> Iterator[SeenNorm]:
    """Make ZeRO's optimizers skip an update if ``should_update`` rejects the norm, and clear the gradients."""
    seen = SeenNorm()

    def is_invalid(norm: Any) -> bool:
        if is_invalid_grad_norm(norm):
            return True
        seen.norm = float(norm)
        return not should_update(seen.norm)

    for module in _OPTIMIZERS:
        setattr(module, _NORM_CHECK, is_invalid)
    try:
        yield seen
    finally:
        for module in _OPTIMIZERS:
            setattr(module, _NORM_CHECK, is_invalid_grad_norm)


def record_queued_gradients(optimizer: Any) -> None:
    """Make DeepSpeed's optimizer record each gradient on the reduction stream; no effect on a CPU."""
    accelerator = get_accelerator()
    assert accelerator is not None, "importing DeepSpeed chooses one"
    if accelerator.resolves_data_dependency():
        return  # a single queue orders all operations
    if isinstance(optimizer, stage_1_and_2.DeepSpeedZeroOptimizer):
        # All reductions pass through here: a full bucket, or a gradient larger than a bucket.
        _record_before(optimizer, "average_tensor", "reduction_stream", _reduced_tensor)
    elif isinstance(optimizer, stage3.DeepSpeedZeroOptimizer_Stage3):
        # Every gradient is dropped here after its reduction.
        _record_before(optimizer, "partition_grads", "reduce_and_partition_stream", _dropped_gradients)


def _record_before(optimizer: Any, method: str, stream: str, tensors: Callable[..., Iterable[Tensor]]) -> None:
    """Wrap a method: before each call, record the tensors selected from its arguments on the optimizer's stream."""
    for name in (method, stream):
        assert hasattr(optimizer, name), f"DeepSpeed {deepspeed.__version__} has no {name}: gradients go unrecorded"
    plain = getattr(optimizer, method)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        for tensor in tensors(*args, **kwargs):
            tensor.record_stream(getattr(optimizer, stream))
        return plain(*args, **kwargs)

    setattr(optimizer, method, recorded)


def _reduced_tensor(tensor: Tensor, *_: Any, **__: Any) -> list[Tensor]:
    return [tensor]


def _dropped_gradients(parameters: Iterable[Any], *_: Any, **__: Any) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]

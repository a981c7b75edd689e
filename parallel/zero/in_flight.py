"""Gradients whose reduction is queued: their memory is kept from reuse until the reduction has run.

With ``overlap_comm`` DeepSpeed queues reductions on a stream of its own while backward goes on, and drops a gradient as
soon as its reduction is queued. PyTorch's allocator knows only the stream that a tensor was made on: it gives the
memory of the dropped gradient to backward's next tensor, although the reduction will still read it, and write into it.
The invariant here: whatever a queued reduction reads or writes has that stream recorded (``Tensor.record_stream``)
before DeepSpeed can drop it; then its memory is given away only after the reduction.

DeepSpeed 0.19.8 records most gradients. It misses, in ``stage_1_and_2.py``, one that is larger than a bucket, on ranks
that own none of it, if its reduction works on a copy: in another dtype, or of two ranks' parts. In ``stage3.py`` it
misses one of which this rank's part is padding alone. docs/upstream/deepspeed-zero2-gradient-lifetime.md has the lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor


def record_queued_gradients(optimizer: Any) -> None:
    """Have DeepSpeed's optimiser record each gradient on the stream that reduces it; nothing on a CPU."""
    accelerator = get_accelerator()
    assert accelerator is not None, "importing DeepSpeed chooses one"
    if accelerator.resolves_data_dependency():
        return  # one queue for everything
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        # Everything that is reduced goes through here: a full bucket, or a gradient that fits into none.
        _record_before(optimizer, "average_tensor", "reduction_stream", _reduced_tensor)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        # Behind its reduction, every gradient is dropped here.
        _record_before(optimizer, "partition_grads", "reduce_and_partition_stream", _dropped_gradients)


def _record_before(optimizer: Any, method: str, stream: str, tensors: Callable[..., Iterable[Tensor]]) -> None:
    """Wrap a method: record on the optimiser's stream what ``tensors`` finds among the method's arguments."""
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

"""``CallSample``: one call in a step, with its arguments and the results that the step used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from parallel.audit.bits import BitDifference
from parallel.audit.tensor_copies import Copied, insert_tensors

Kind = Literal["product", "attention", "update"]
"""Audited operations in a step: a matmul, an attention kernel call, or an AdamW update of some weights."""


UPDATE = "longctx::adamw"
"""Operator name in samples of an update."""
_BOUNDED = ("aten::mm.default", "aten::mm.out")


class Place(NamedTuple):
    """Position of a call in a step."""

    kind: Kind
    call: str
    """Operator and argument shapes."""
    phase: str
    """forward or backward; empty for an update."""
    layer: int | None
    """Decoder layer entered last; None outside all layers."""
    weight: str
    """Parameter that the call reads, or whose gradient or update it computes; empty if unknown."""

    def describe(self) -> str:
        """Return it as text, for a message."""
        if self.kind == "update":
            return f"the optimizer's update of {self.weight or 'some weights'} ({self.call})"
        where = self.weight
        if not where and self.layer is not None:
            where = f"layer {self.layer}"
        text = f"{_KINDS[self.kind]} in the {self.phase} pass ({self.call})"
        if where:
            text += f" of {where}"
        return text


_KINDS: dict[Kind, str] = {"product": "a matmul", "attention": "attention", "update": "the update"}


@dataclass(frozen=True, kw_only=True)
class CallSample:
    """One call, with everything needed to repeat it."""

    op: str
    """Operator name with overload, or ``UPDATE``."""
    args: Any
    """Arguments with slots for tensors."""
    kwargs: Any
    inputs: Sequence[Copied]
    """Tensors for these slots, as they were before the call."""
    outputs: Sequence[Tensor]
    """Flat results, as the step used them."""
    place: Place
    own: BitDifference | None = None
    """This rank's own result: difference between the step's result and an immediate repetition. None if they are equal,
    or if it was not repeated."""
    is_tile: bool = False
    """True if this is a part of a call that is too large to send."""
    is_alone: bool = False
    """True if even a part was too large: the call was repeated locally, and no data is left to send."""

    @property
    def is_bounded(self) -> bool:
        """True if ranks that compute other bits can check it: a rounding bound is known."""
        return self.op == UPDATE or self.op in _BOUNDED

    @property
    def tensors(self) -> list[Tensor]:
        """Flat values for inputs and outputs."""
        return [x.values for x in self.inputs] + list(self.outputs)

    def with_tensors(self, tensors: Sequence[Tensor]) -> CallSample:
        """Return the same call with other ``tensors``."""
        inputs = [x._replace(values=values) for x, values in zip(self.inputs, tensors, strict=False)]
        return replace(self, inputs=inputs, outputs=tensors[len(inputs) :])

    def without_values(self) -> CallSample:
        """Return the sample without values: the header that other ranks receive before the data."""
        return self.with_tensors([x.to("meta") for x in self.tensors])

    def call(self, device: torch.device) -> tuple[Any, Any]:
        """Return the arguments and keyword arguments, in their original memory layout."""
        tensors = [x.laid_out(device) for x in self.inputs]
        return insert_tensors(self.args, tensors), insert_tensors(self.kwargs, tensors)

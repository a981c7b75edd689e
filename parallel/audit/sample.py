"""``Sample``: one call of a step, with its arguments and the results that the step used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from parallel.audit.bits import Difference
from parallel.audit.copies import Copied, put_together

Kind = Literal["product", "attention", "update"]
"""What of a step is looked at: a matrix product, a call of an attention kernel, or AdamW's update of some weights."""


UPDATE = "longctx::adamw"
"""What a sample of an update names as its operator."""
_BOUNDED = ("aten::mm.default", "aten::mm.out")


class Place(NamedTuple):
    """Place of a call in a step."""

    kind: Kind
    call: str
    """The operator, with the shapes that it was given."""
    phase: str
    """forward or backward; empty of an update."""
    layer: int | None
    """The decoder layer that was last entered; None outside of all."""
    weight: str
    """The parameter that the call reads, or whose gradient or update it forms; empty where none is known."""

    def describe(self) -> str:
        """Return it in words, for a message."""
        if self.kind == "update":
            return f"the optimiser's update of {self.weight or 'some weights'} ({self.call})"
        where = self.weight
        if not where and self.layer is not None:
            where = f"layer {self.layer}"
        text = f"{_KINDS[self.kind]} in the {self.phase} pass ({self.call})"
        if where:
            text += f" of {where}"
        return text


_KINDS: dict[Kind, str] = {"product": "a product", "attention": "attention", "update": "the update"}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One call, with everything needed to repeat it."""

    op: str
    """The operator by name and overload, or ``UPDATE``."""
    args: Any
    """Arguments with slots for tensors."""
    kwargs: Any
    inputs: Sequence[Copied]
    """The tensors for these slots, as they were before the call."""
    outputs: Sequence[Tensor]
    """Flat results, as the step went on with them."""
    place: Place
    own: Difference | None = None
    """What this rank found by itself: how the step's result differs from that of the same call, made again at once.
    None where that is equal, or was not tried."""
    is_tile: bool = False
    """Whether this is a part of a call that is too large to be sent."""
    is_alone: bool = False
    """Whether the call was too large even for that: it was made again here, and nothing is left to send."""

    @property
    def is_bounded(self) -> bool:
        """True if ranks that compute other bits can check it: a bound of its rounding is known."""
        return self.op == UPDATE or self.op in _BOUNDED

    @property
    def tensors(self) -> list[Tensor]:
        """Flat values of inputs and outputs."""
        return [x.values for x in self.inputs] + list(self.outputs)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Sample:
        """Return the same call with other ``tensors``."""
        inputs = [x._replace(values=values) for x, values in zip(self.inputs, tensors, strict=False)]
        return replace(self, inputs=inputs, outputs=tensors[len(inputs) :])

    def without_values(self) -> Sample:
        """Return the sample without values, for another rank to know before the bytes come."""
        return self.with_tensors([x.to("meta") for x in self.tensors])

    def call(self, device: torch.device) -> tuple[Any, Any]:
        """Return the arguments and keyword arguments, laid out as they were."""
        tensors = [x.laid_out(device) for x in self.inputs]
        return put_together(self.args, tensors), put_together(self.kwargs, tensors)

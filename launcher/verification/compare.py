"""Steps of two programs side by side, by part of the model: how far apart they are, and whether that is rounding.

In float32 two right programs differ by the order of their sums. In bfloat16 both are far from float32, and a right one
is about as far as the other: its error is measured in the other one's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.verification.state import StepState

LOSS_BOUND, GRADIENT_BOUND, WEIGHT_BOUND = 1e-5, 1e-4, 1e-2
"""Of float32, relative: of a loss; of a gradient and its norm; of the way that weights have gone, for AdamW divides a
gradient by its own size, so that the smallest ones weigh as much as the largest."""
GRADIENT_ERROR_BOUND, WEIGHT_ERROR_BOUND = 2.0, 4.0
"""Of bfloat16: by how much an error may exceed that of one process, which is as much by chance. AdamW's first steps are
as long for a gradient that is all rounding as for any other: weights differ by the few signs that fell otherwise."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


@dataclass(frozen=True)
class Finding:
    """One figure of one part."""

    step: int
    """From 1."""
    part: str
    what: str
    """loss, gradient norm, gradients, weights."""
    error: float
    bound: float

    @property
    def held(self) -> bool:
        """Whether the error is within its bound; one that is no number never is."""
        return self.error <= self.bound


def part_of(name: str) -> str:
    """The part of the model that a weight belongs to: of a layer its norms, attention, router, experts or FFN."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name.removesuffix(".weight").removeprefix("model.")
    layer, rest = match.groups()
    kinds = {
        "self_attn": "attention",
        "mlp.gate.": "router",
        "mlp.experts": "experts",
        "mlp.shared_expert": "shared expert",
        "mlp": "FFN",
    }
    for prefix, kind in kinds.items():
        if rest.startswith(prefix):
            return f"layer {layer}, {kind}"
    return f"layer {layer}, norms"


def compare(
    got: Sequence[StepState],
    wanted: Sequence[StepState],
    start: dict[str, Tensor],
    other: Sequence[StepState] | None = None,
) -> list[Finding]:
    """Every figure of every step, in the order in which it is computed.

    ``wanted`` are one process's states in float32, ``start`` the weights before its first step. ``other`` are those of
    one process in the run's own dtype, where that is another one: then errors are measured in its errors.
    """
    findings = []
    for number, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        yardstick = None
        if other is not None:
            yardstick = other[number]
        findings.extend(_step(number + 1, mine, theirs, yardstick, start))
        start = theirs.weights
    return findings


def _step(
    step: int,
    got: StepState,
    wanted: StepState,
    other: StepState | None,
    before: dict[str, Tensor],
) -> Iterator[Finding]:
    for what, bound in (("loss", LOSS_BOUND), ("grad_norm", GRADIENT_BOUND)):
        mine, theirs = getattr(got, what), getattr(wanted, what)
        error = abs(mine - theirs) / max(abs(theirs), 1e-30)
        name = what.replace("grad_norm", "gradient norm")
        if other is not None:
            # A single number may be right by chance: bfloat16 has two digits, of a sum of thousands a third one.
            bound = 1e-2
        yield Finding(step, "", name, _number(error), bound)
    for what, bound in (("gradients", GRADIENT_BOUND), ("weights", WEIGHT_BOUND)):
        mine, theirs = getattr(got, what), getattr(wanted, what)
        for part, names in _parts(theirs).items():
            distance = _distance(mine, theirs, names)
            scale = _size(theirs, names)
            if what == "weights":
                scale = _distance(before, theirs, names)
            limit = bound
            if other is not None:
                scale, limit = _distance(getattr(other, what), theirs, names), GRADIENT_ERROR_BOUND
                if what == "weights":
                    limit = WEIGHT_ERROR_BOUND
            # A part that has no gradient, as a bias that nothing adds to, is equal or wrong.
            error = 0.0
            if distance:
                error = distance / max(scale, 1e-30)
            yield Finding(step, part, what, _number(error), limit)


def _parts(tensors: dict[str, Tensor]) -> dict[str, list[str]]:
    parts: dict[str, list[str]] = {}
    for name in tensors:
        parts.setdefault(part_of(name), []).append(name)
    return parts


def _distance(a: dict[str, Tensor], b: dict[str, Tensor], names: Sequence[str]) -> float:
    total = 0.0
    for name in names:
        if name not in a:
            return math.inf
        total += float((a[name].cpu().double() - b[name].cpu().double()).square().sum())
    return math.sqrt(total)


def _size(tensors: dict[str, Tensor], names: Sequence[str]) -> float:
    return math.sqrt(sum(float(torch.linalg.vector_norm(tensors[name].double()).square()) for name in names))


def _number(error: float) -> float:
    if math.isnan(error):
        return math.inf
    return error

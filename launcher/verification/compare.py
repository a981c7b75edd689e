"""Compare steps from two programs by model part: their difference, relative to that caused by rounding.

In float32 two correct programs differ by summation order. In bfloat16 both are far from float32, a correct one about as
far as the other: its error is measured relative to the other's. This holds for rows of any length: the reference
process loses the same precision in the same step, with the same weights and the same experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.metrics.expert_load import expert_layers
from launcher.verification.choices import RouterState, unexplained_share
from longctx.config import ModelConfig

LOSS_BOUND, GRADIENT_BOUND, WEIGHT_BOUND = 1e-5, 1e-4, 1e-3
"""Relative float32 bounds: for a loss; for a gradient and its norm; for the distance that weights have moved. AdamW
divides a gradient by its own size, so that the smallest ones weigh as much as the largest. It is float32 in every run.
"""
BFLOAT16_LOSS_BOUND = 1e-2
"""For bfloat16, which has two digits: the mean over a few tokens' losses has them too."""
GRADIENT_ERROR_BOUND = 2.0
"""For bfloat16: ratio by which an error may exceed one process's error, which is as large by chance."""
_LAYER = re.compile(r"(model|encoder|model\.stages\.\d+)\.layers\.(\d+)\.(.*)")


@dataclass(frozen=True, kw_only=True)
class StepState:
    """A step's loss and gradients, and the weights after it."""

    loss: float
    """Negative log-likelihood per target."""
    grad_norm: float
    """Before clipping."""
    gradients: dict[str, Tensor]
    """Clipped, float32, flat, by weight name."""
    weights: dict[str, Tensor]
    """The optimizer's float32 masters, after the step."""
    experts_LTk: Tensor | None = None
    """Experts that the run chose for each token in the step, by expert layer; None in a dense model."""
    routers: tuple[RouterState, ...] = ()
    """Reference routers, micro-batch by micro-batch, with the run's choices replayed."""


@dataclass(frozen=True)
class StepError:
    """Error and bound for one quantity in one model part."""

    step: int
    """Counted from 1."""
    part: str
    metric: str
    """One of: experts chosen, loss, gradient norm, gradients, weights."""
    error: float
    bound: float

    @property
    def held(self) -> bool:
        """True if the error is within its bound; never for NaN."""
        return self.error <= self.bound


def part_of(name: str) -> str:
    """Return a weight's model part: in a layer norms, attention, router, experts or FFN."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name.removesuffix(".weight").removeprefix("model.")
    stack, layer, rest = match.groups()
    where = f"layer {layer}"
    if stack == "encoder":
        where = f"encoder layer {layer}"
    elif stack != "model":
        where = f"stage {stack.rpartition('.')[2]}, layer {layer}"
    kinds = {
        "self_attn": "attention",
        "cross_attn": "cross attention",
        "mlp.gate.": "router",
        "mlp.experts": "experts",
        "mlp.shared_expert": "shared expert",
        "mlp": "FFN",
    }
    for prefix, kind in kinds.items():
        if rest.startswith(prefix):
            return f"{where}, {kind}"
    return f"{where}, norms"


def compare_steps(
    got: Sequence[StepState],
    wanted: Sequence[StepState],
    start: dict[str, Tensor],
    other: Sequence[StepState] | None = None,
    *,
    model: ModelConfig,
) -> list[StepError]:
    """Return all results for all steps, in the order of computation.

    ``wanted`` holds one process's states in float32, ``start`` the weights before the first step. ``other`` holds one
    process's states in the run's own dtype, if that is not float32: then errors are relative to its errors. Both follow
    ``got``, step by step.
    """
    errors = []
    for number, (actual, reference) in enumerate(zip(got, wanted, strict=True)):
        yardstick = None
        if other is not None:
            yardstick = other[number]
        errors.extend(_choices(number + 1, reference, yardstick, model))
        errors.extend(_step(number + 1, actual, reference, yardstick, start))
        start = actual.weights
    return errors


def _choices(step: int, wanted: StepState, other: StepState | None, model: ModelConfig) -> Iterator[StepError]:
    """Yield, for each router, the share of tokens with experts that rounding does not explain."""
    layers = expert_layers(model)
    for number, state in enumerate(wanted.routers):
        # The other process's logits are off by chance, too: one's largest error may be half the other's.
        slack = GRADIENT_BOUND * float(state.logits_NE.abs().max())
        if other is not None:
            slack = GRADIENT_ERROR_BOUND * float((other.routers[number].logits_NE - state.logits_NE).abs().max())
        part = f"layer {layers[number % len(layers)]}, router"
        yield StepError(step, part, "experts chosen", unexplained_share(state, slack, model), 0.0)


def _step(
    step: int,
    got: StepState,
    wanted: StepState,
    other: StepState | None,
    before: dict[str, Tensor],
) -> Iterator[StepError]:
    for metric, bound in (("loss", LOSS_BOUND), ("grad_norm", GRADIENT_BOUND)):
        actual, reference = getattr(got, metric), getattr(wanted, metric)
        error = abs(actual - reference) / max(abs(reference), 1e-30)
        name = metric.replace("grad_norm", "gradient norm")
        if other is not None:
            # A single number may be right by chance, so the other's own error is not used as the bound.
            bound = BFLOAT16_LOSS_BOUND
            if metric == "grad_norm":
                bound = _norm_bound(other, wanted)
        yield StepError(step, "", name, _number(error), bound)
    for metric, bound in (("gradients", GRADIENT_BOUND), ("weights", WEIGHT_BOUND)):
        actual, reference = getattr(got, metric), getattr(wanted, metric)
        for part, names in _parts(reference).items():
            # Gradient errors are relative to the gradient, or in bfloat16 to one process's error; weight errors are
            # relative to the distance moved.
            distance = _distance(actual, reference, names)
            scale, limit = _size(reference, names), bound
            if metric == "weights":
                scale = _distance(before, reference, names)
            elif other is not None:
                scale, limit = _distance(other.gradients, reference, names), GRADIENT_ERROR_BOUND
            # A part without a gradient, such as a bias without effect, is either equal or wrong.
            error = 0.0
            if distance:
                error = distance / max(scale, 1e-30)
            yield StepError(step, part, metric, _number(error), limit)


def _norm_bound(other: StepState, wanted: StepState) -> float:
    """Return the relative gradient norm error that rounding may cause."""
    names = list(wanted.gradients)
    norm_error = 0.0
    size, wanted_size = _size(other.gradients, names), _size(wanted.gradients, names)
    if size and wanted_size:
        # Clipped gradients have the same length: undo the clipping.
        unclipped = {name: x * (other.grad_norm / size) for name, x in other.gradients.items()}
        reference = {name: x * (wanted.grad_norm / wanted_size) for name, x in wanted.gradients.items()}
        norm_error = _distance(unclipped, reference, names) / max(wanted.grad_norm, 1e-30)
    # The norm's error is at most the error's length, which in a correct run is at most twice the other's. And the
    # error, a sum over many tokens' rounding errors, is mostly orthogonal to the gradient: at most half counts.
    return GRADIENT_ERROR_BOUND / 2 * norm_error


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

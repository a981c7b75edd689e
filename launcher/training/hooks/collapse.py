"""Warning about layers that send all tokens to the same few experts, once per layer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from launcher.metrics.record import Record
from launcher.training.hook import RunningStep, StepHook
from longctx.config import ModelConfig

log = logging.getLogger(__name__)

_SHARE = 0.9
"""Share of a layer's choices on its k busiest experts, for k experts per token: the worst case is 1, and max/mean is
then E / k."""
_STEPS = 20
"""Consecutive steps."""
_MIN_RATIO = 2.0
"""E / k below which this is no collapse: half of all experts are busy then."""


class Collapse(StepHook):
    """Counts each layer's consecutive steps in which nearly all tokens chose the same k experts."""

    def __init__(self, model: ModelConfig, layers: Sequence[int], window: int = _STEPS) -> None:
        self._model, self._layers, self._window = model, list(layers), window
        self._worst = model.num_experts / max(1, model.experts_per_token)
        self._steps_L = torch.zeros(len(self._layers), dtype=torch.int64)
        self._reported_L = torch.zeros_like(self._steps_L, dtype=torch.bool)

    def find(self, counts_LE: Tensor) -> list[int]:
        """Return the layers that have now, for the first time, been collapsed for a full window of steps."""
        # Balanced routing gives any k experts the share k / E of a layer's choices.
        top_k_L = counts_LE.topk(self._model.experts_per_token, dim=1).values.sum(dim=1)
        is_collapsed_L = top_k_L > _SHARE * counts_LE.sum(dim=1)
        # One step without collapse resets a layer's count.
        self._steps_L = torch.where(is_collapsed_L, self._steps_L + 1, 0)
        found_L = (self._steps_L >= self._window) & ~self._reported_L
        self._reported_L |= found_L
        return [self._layers[row] for row in found_L.nonzero().flatten().tolist()]

    def before_log(self, step: RunningStep, record: Record) -> None:
        """Warn about collapsed layers. A skipped step has no load of its own."""
        if (
            self._layers
            and self._worst >= _MIN_RATIO
            and not step.skip_reason
            and (found := self.find(step.totals.counts_LE))
        ):
            log.warning("%s", self.warning(found, step.number))

    def warning(self, layers: Sequence[int], step: int) -> str:
        """Return the warning about the layers from ``find``."""
        model = self._model
        layer_names = f"layer {layers[0]}"
        if len(layers) > 1:
            layer_names = f"layers {', '.join(map(str, layers))}"
        return (
            f"The experts in {layer_names} have collapsed: in steps {step - self._window + 1} to {step} over "
            f"{_SHARE:.0%} of all assignments went to {model.experts_per_token} of {model.num_experts} experts, so "
            "the others do not learn. For a young model, try train.optimizer=muon, more train.tokens_per_step, "
            f"model.router_jitter=0.3 (now {model.router_jitter:g}), and from the start model.tie_embeddings=false "
            f"with model.embedding_std=1 (now {model.embedding_std:g}). docs/experts.md has measurements. Reported "
            "once per layer."
        )

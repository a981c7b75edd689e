"""Expert figures of a step."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.metrics.expert_load import max_violation, mean_violation
from launcher.metrics.record import Record
from launcher.training.totals import StepTotals
from longctx.config import ModelConfig


def expert_layers(model: ModelConfig) -> list[int]:
    """The layers that have experts, in order: the rows of every tensor with an L axis."""
    return [layer for layer in range(model.num_layers) if model.has_experts(layer)]


def expert_record(totals: StepTotals, layers: Sequence[int], num_tokens: int) -> Record:
    """The fields of a train record about experts, empty lists in a dense model. Formulas: ``docs/run-folder.md``.

    ``num_tokens`` is the step's, without padding.
    """
    loads, routers = totals.counts_LE.tolist(), totals.diagnostics
    # A step of nothing but padding divides by 1, not by 0.
    tokens = max(1, num_tokens)
    chosen_L = totals.counts_LE.sum(1).clamp(min=1)
    balance_loss = router_z_loss = None
    if loads:
        balance_loss = totals.sums["balance"] / tokens / len(loads)
        router_z_loss = totals.sums["router_z"] / tokens
    return {
        "balance_loss": balance_loss,
        "router_z_loss": router_z_loss,
        "expert_layers": list(layers),
        "expert_load": loads,
        "expert_max_violation": [max_violation(counts) for counts in loads],
        "expert_mean_violation": [mean_violation(counts) for counts in loads],
        "expert_dropped_share": (routers.dropped_assignments / chosen_L).tolist(),
        "router_entropy": (routers.entropy / tokens).tolist(),
        "router_logit_rms": (routers.squared_logits / tokens).sqrt().tolist(),
    }

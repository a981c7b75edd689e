"""Build a network's training objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from longctx.batch import Batch
from longctx.model.decoder import Decoder
from longctx.objectives.causal_lm import CausalLM
from longctx.objectives.masked_lm import MaskedLM
from longctx.objectives.task import Task
from longctx.objectives.token_prediction import Shift, TokenPrediction, identity, next_values

TASKS: dict[str, type[TokenPrediction]] = {"causal": CausalLM, "masked": MaskedLM, "spans": CausalLM}
"""Objectives that a config can name (``train.objective``)."""


@dataclass(frozen=True)
class Objective:
    """Objective and its options: keys in ``[train]``, from ``launcher.training.task_builder.objective_of``."""

    name: str = "causal"
    """A key in ``TASKS``."""
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    mtp_weight: float = 0.0


NEXT_TOKEN = Objective()


def build_objective(
    network: Decoder,
    objective: Objective = NEXT_TOKEN,
    reduce_counts: Callable[[Tensor, Batch], Tensor] = identity,
    shift: Shift = next_values,
) -> Task:
    """Build a network's task, for multi-rank runs and for the single-process reference.

    Data from other ranks comes through a callable, ``reduce_counts`` or ``shift``, that ``parallelize`` provides.
    """
    return TASKS[objective.name](
        network,
        reduce_counts,
        shift=shift,
        z_loss=objective.z_loss,
        label_smoothing=objective.label_smoothing,
        mtp_weight=objective.mtp_weight,
    )

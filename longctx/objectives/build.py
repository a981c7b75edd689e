"""Build a network's training objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from longctx.batch import Batch
from longctx.model.decoder import Decoder
from longctx.objectives.causal_lm import CausalLM
from longctx.objectives.classes import Classes
from longctx.objectives.document_labels import ReduceSums
from longctx.objectives.masked_lm import MaskedLM
from longctx.objectives.routed_task import RoutedTask, identity
from longctx.objectives.task import Task
from longctx.objectives.token_prediction import Shift, TokenPrediction, next_values

TASKS: dict[str, type[RoutedTask]] = {"causal": CausalLM, "masked": MaskedLM, "spans": CausalLM, "classes": Classes}
"""Objectives that a config can name (``train.objective``)."""


@dataclass(frozen=True)
class Objective:
    """Objective and its options: keys in ``[train]``, from ``launcher.training.task_builder.objective_of``."""

    name: str = "causal"
    """A key in ``TASKS``."""
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    mtp_weight: float = 0.0
    class_weight: float = 0.0


NEXT_TOKEN = Objective()


def build_objective(
    network: Decoder,
    objective: Objective = NEXT_TOKEN,
    reduce_counts: Callable[[Tensor, Batch], Tensor] = identity,
    shift: Shift = next_values,
    reduce_sums: ReduceSums = identity,
) -> Task:
    """Build a network's task, for multi-rank runs and for the single-process reference.

    Data from other ranks comes through a callable, ``reduce_counts``, ``shift`` or ``reduce_sums``, that
    ``parallelize`` provides.
    """
    kind = TASKS[objective.name]
    if issubclass(kind, Classes):
        return kind(network, reduce_counts, reduce_sums, label_smoothing=objective.label_smoothing)
    assert issubclass(kind, TokenPrediction)
    return kind(
        network,
        reduce_counts,
        reduce_sums,
        shift=shift,
        z_loss=objective.z_loss,
        label_smoothing=objective.label_smoothing,
        mtp_weight=objective.mtp_weight,
        class_weight=objective.class_weight,
    )

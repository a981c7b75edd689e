"""Build a network's training objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from longctx.batch import Batch
from longctx.model.decoder import Decoder
from longctx.objectives.causal_lm import CausalLM
from longctx.objectives.classes import Classes
from longctx.objectives.document_labels import ReduceSums
from longctx.objectives.masked_lm import MaskedLM
from longctx.objectives.preferences import Preferences
from longctx.objectives.routed_task import RoutedTask, identity
from longctx.objectives.task import Task
from longctx.objectives.token_prediction import Shift, TokenPrediction, next_values
from longctx.preference_options import PreferenceOptions

TASKS: dict[str, type[RoutedTask]] = {
    "causal": CausalLM,
    "masked": MaskedLM,
    "spans": CausalLM,
    "classes": Classes,
    "preferences": Preferences,
}
"""Objectives that a config can name (``train.objective``)."""


@dataclass(frozen=True)
class Objective:
    """Objective and its options, keys in ``[train]`` and ``[preference]``, from
    ``launcher.training.task_builder.objective_of``."""

    name: str = "causal"
    """A key in ``TASKS``."""
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    mtp_weight: float = 0.0
    class_weight: float = 0.0
    preference: PreferenceOptions = field(default_factory=PreferenceOptions)


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
    if issubclass(kind, Preferences):
        return kind(network, reduce_counts, reduce_sums, options=objective.preference)
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

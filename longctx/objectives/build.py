"""Which objective a network is trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from longctx.batch import Batch
from longctx.model.decoder import Decoder
from longctx.objectives.causal_lm import CausalLM, identity
from longctx.objectives.task import Task


@dataclass(frozen=True)
class Objective:
    """Which objective, and its options: keys of ``[train]``, by ``launcher.training.model.objective_of``."""

    z_loss: float = 0.0
    label_smoothing: float = 0.0


NEXT_TOKEN = Objective()


def build_objective(
    network: Decoder, objective: Objective = NEXT_TOKEN, reduce_counts: Callable[[Tensor, Batch], Tensor] = identity
) -> Task:
    """Return the task of a network: of a run's over many ranks, and of the one process that it is compared with.

    What an objective needs from other ranks is a callable, such as ``reduce_counts``, that ``parallelize`` hands over.
    """
    return CausalLM(network, reduce_counts, z_loss=objective.z_loss, label_smoothing=objective.label_smoothing)

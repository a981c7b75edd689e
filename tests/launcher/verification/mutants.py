"""Faults that are put into the parallel code while a configuration is verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch

import launcher.verification.parallel_steps as together
import parallel.transport.point_to_point as point_to_point
import parallel.zero.partition as partition
from longctx.model.chunks.layer_parts import WeightSums
from longctx.model.experts.router import Router
from longctx.objectives.task import Counts, Task
from parallel.experts.dispatcher import AllToAllDispatcher
from parallel.transport.ring_exchange import PendingGradients
from parallel.zero.optimizer import optimizer_groups
from parallel.zero.zero_engine import ZeroEngine

Patch = AbstractContextManager[Any]
"""What has the fault while it lasts."""


def nothing_merged() -> Patch:
    """The ring forgets what the other rank's keys gave."""
    return patch.object(point_to_point, "merge_block_", lambda *_: None)


def gradients_of_keys_lost() -> Patch:
    """dK and dV come back to their owner and are not added."""

    def add_to(self: PendingGradients, total: Any) -> None:
        self.messages.wait()

    return patch.object(PendingGradients, "add_to", add_to)


def positions_of_the_shard() -> Patch:
    """Positions count this rank's tokens."""
    shard_batch = together.shard_batch

    def local(*args: Any) -> Any:
        shard = shard_batch(*args)
        shard.positions.copy_(torch.arange(shard.positions.numel()).view_as(shard.positions))
        return shard

    return patch.object(together, "shard_batch", local)


def counts_of_this_rank() -> Patch:
    """The loss is divided by this rank's targets."""

    def own(task: Task, shards: Any) -> Counts:
        return task.count(shards)

    return patch.object(together, "count_step", own)


def mean_over_ranks() -> Patch:
    """The loss scale that undoes DeepSpeed's mean is left out."""

    def backward(self: ZeroEngine, loss: torch.Tensor) -> None:
        self.partition.engine.backward(loss, scale_wrt_gas=False)
        if not self.partition.engine.is_gradient_accumulation_boundary():
            self.partition.engine.step()

    return patch.object(ZeroEngine, "backward", backward)


def a_micro_batch_lost() -> Patch:
    """The second micro-batch of a step adds nothing."""
    backward, seen = ZeroEngine.backward, []

    def every_other(self: ZeroEngine, loss: torch.Tensor) -> None:
        seen.append(loss)
        backward(self, loss * (len(seen) % 2))

    return patch.object(ZeroEngine, "backward", every_other)


def everything_decays() -> Patch:
    """ZeRO's groups: norms and biases decay, too."""

    def one_kind(model: Any, weight_decay: float, matrices: Any) -> Any:
        return [{**group, "weight_decay": weight_decay} for group in optimizer_groups(model, weight_decay, matrices)]

    return patch.object(partition, "optimizer_groups", one_kind)


def learning_rate_late() -> Patch:
    """ZeRO's groups keep the first learning rate: the second step takes half of it."""
    step, taken = ZeroEngine.step, []

    def halved(self: ZeroEngine, lr: float) -> float:
        taken.append(lr)
        return step(self, lr / len(taken))

    return patch.object(ZeroEngine, "step", halved)


def results_of_experts_elsewhere_lost() -> Patch:
    """Tokens come back from experts scaled down."""
    handle = AllToAllDispatcher.handle

    def weaker(self: AllToAllDispatcher, *args: Any, **options: Any) -> Any:
        made = handle(self, *args, **options)
        combine = made.combine

        def scaled(values: torch.Tensor, dtype: torch.dtype) -> Any:
            return combine(values * 0.98, dtype)

        object.__setattr__(made, "combine", scaled)
        return made

    return patch.object(AllToAllDispatcher, "handle", weaker)


def a_router_turned() -> Patch:
    """The run's routers prefer the first expert by a tenth of the logits' size."""
    build_engine = together.build_engine

    def turned(*args: Any, **options: Any) -> ZeroEngine:
        engine = build_engine(*args, **options)

        def prefer(_: Any, __: Any, logits_NE: torch.Tensor) -> torch.Tensor:
            favour_E = torch.zeros(logits_NE.shape[1])
            favour_E[0] = 0.1 * float(logits_NE.detach().abs().max())
            return logits_NE + favour_E

        for part in engine.model.modules():
            if isinstance(part, Router):
                part.register_forward_hook(prefer)
        return engine

    return patch.object(together, "build_engine", turned)


def the_first_chunk_alone() -> Patch:
    """By chunks: weights get the gradient of the first chunk that meets them."""
    add = WeightSums.add

    def first(self: WeightSums, gradients: Sequence[torch.Tensor | None]) -> None:
        news = [None if total is not None else x for total, x in zip(self._sums, gradients, strict=True)]
        add(self, news)

    return patch.object(WeightSums, "add", first)


MUTANTS: dict[str, tuple[Callable[[], Patch], str]] = {
    "ring, forward": (nothing_merged, "experts chosen"),
    "ring, backward": (gradients_of_keys_lost, "gradient"),
    "positions": (positions_of_the_shard, "experts chosen"),
    "loss, counts": (counts_of_this_rank, "loss"),
    "loss, scale": (mean_over_ranks, "gradient norm"),
    "accumulation": (a_micro_batch_lost, "gradient"),
    "ZeRO, decay": (everything_decays, "weights"),
    "ZeRO, rate": (learning_rate_late, "weights"),
    "experts": (results_of_experts_elsewhere_lost, "gradient"),
    "router": (a_router_turned, "experts chosen"),
    "chunks": (the_first_chunk_alone, "gradient norm"),
}
"""Name -> (fault, what is found to differ)."""

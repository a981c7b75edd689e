"""``ZeroEngine``: a module under ZeRO, the same to its callers in every stage.

DeepSpeed is given no mpu, no mesh and no sequence-parallel size: it averages gradients over all ranks, and the loss is
scaled once by their number. Every other set-up of this version is wrong in some stage (see
docs/decisions/2026-11-deepspeed-grouping.md). Where experts are spread over ranks, marks on their
weights and a module of a class that it looks for say so (docs/decisions/2026-11-expert-parallel.md).
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from longctx.batch import Batch
from longctx.checkpoint_format import ROLES
from longctx.errors import GradientError
from longctx.model.training_pass import TrainingPass
from longctx.objectives.task import LossSum, Task
from parallel.comm.world import num_ranks
from parallel.runtime.spans import begin, enter_layer
from parallel.zero.deepspeed_config import quiet_deepspeed
from parallel.zero.gradients import Accept, everything, named_on_any_rank, not_finite
from parallel.zero.muon import matrices_of
from parallel.zero.optimizer import OptimizerOptions, import_muon
from parallel.zero.options import ZeroOptions, check_zero
from parallel.zero.partition import Wrapping
from parallel.zero.stages import PARTITIONS
from parallel.zero.state import InitialWeights, OwnedRange, Piece, ReadRange, owned_pieces, read_state, write_state
from parallel.zero.tensors import ModelTensors, mark_experts


class ZeroEngine:
    """A ``Task`` under ZeRO: micro-batches in, one optimiser step out, whatever the stage."""

    def __init__(
        self,
        model: Task,
        *,
        stage: int,
        dtype: torch.dtype,
        accumulation: int,
        options: OptimizerOptions,
        zero: ZeroOptions | None = None,
    ) -> None:
        """Hand the module to DeepSpeed. ``accumulation`` micro-batches make a step.

        Which experts are here is what the decoder's dispatcher says. A model on the meta device gets memory for what
        this rank holds of it, which ``initialize`` or ``load`` has to set.
        """
        check_zero(stage, dtype)
        quiet_deepspeed()
        import_muon()
        stacks = [stack for stack in (model.network.model, model.network.encoder) if stack is not None]
        blocks = [layer for stack in stacks for layer in stack.layers]
        blocks.extend(ahead.block for stack in stacks for ahead in stack.mtp)
        for layer in blocks:
            layer.register_forward_pre_hook(_before_layer, with_kwargs=True)
        self.stage, self.dtype = stage, dtype
        self.tensors = ModelTensors.of(model.network, mark_experts(model))
        self.partition = PARTITIONS[stage](
            Wrapping(
                model=model,
                tensors=self.tensors,
                stage=stage,
                dtype=dtype,
                accumulation=accumulation,
                options=options,
                zero=zero or ZeroOptions(),
                # Before anything is partitioned.
                matrices=matrices_of(model) if options.name == "muon" else {},
            )
        )

    @property
    def model(self) -> Task:
        """The wrapped module, for evaluation without gradients."""
        return self.partition.engine.module

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, each counted once."""
        return sum(shape.numel() for shape in self.tensors.parameters.values())

    @property
    def roles(self) -> dict[str, tuple[str, ...]]:
        """What is kept of every parameter and buffer of the whole model, by name."""
        kept = {name: self.partition.roles(name) for name in self.tensors.parameters}
        return kept | dict.fromkeys(self.tensors.buffers, ROLES[:1])

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every parameter and buffer of the whole model, by name."""
        return self.tensors.shapes

    def forward(self, batch: Batch, training_pass: TrainingPass | None = None) -> LossSum:
        """The module's forward on this rank's shard of a micro-batch."""
        begin("forward")
        return self.model.loss_sum(self.partition.engine(batch, training_pass))

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of what this rank adds to the step's loss; between micro-batches they add up."""
        begin("backward")
        engine = self.partition.engine
        # The loss has the step's global count below it already, and DeepSpeed averages over all ranks: undo the mean.
        engine.backward(loss * num_ranks(), scale_wrt_gas=False)
        if not engine.is_gradient_accumulation_boundary():
            engine.step()  # counts the micro-batch; updates nothing

    def step(self, lr: float, accept: Accept = everything) -> float:
        """Clip, update with this learning rate, clear the gradients; returns the gradient norm before clipping.

        GradientError on every rank alike when that norm is not finite, or when ``accept`` refuses it, which has to
        answer alike on every rank. Weights and moments are then as before, in every stage, and gradients cleared: the
        next step may follow. Collective.
        """
        begin("optimizer step")
        for group in self.partition.engine.optimizer.param_groups:
            group["lr"] = lr
        # Before the update, which frees the gradients. A small tensor, and no wait: it is read only if the norm is bad.
        broken = self._broken_gradients()
        norm, taken = self.partition.update(accept)
        if not taken:
            names = [] if math.isfinite(norm) else named_on_any_rank(broken, self.shapes)
            raise GradientError(norm, names)
        return norm

    def broken_weights(self) -> list[str]:
        """Names of the parameters and buffers that hold a value that is not finite. Collective."""
        # Each rank looks at what it holds; the reduction inside makes the answer the same everywhere.
        device, found = self.partition.engine.device, {}
        for name, buffer in self.model.network.named_buffers():
            found[name] = not_finite([buffer], device)
        for name, p in self.model.network.named_parameters():
            # One after the other: a part may have to be read from a disk.
            found[name] = not_finite([self.partition.working_part(name, p)], device)
        return named_on_any_rank(torch.cat([found[name] for name in self.shapes]), self.shapes)

    def owned_pieces(self) -> list[Piece]:
        """Which ranges of the whole model's tensors ``owned_ranges`` gives; nothing is read for it."""
        return owned_pieces(self.model.network, self.partition, self.tensors)

    def owned_ranges(self) -> Generator[OwnedRange]:
        """Master weights, moments and buffers as fp32 ranges of the whole model's tensors.

        Over all ranks every value exactly once. What a disk holds is in memory until the next range is asked for: go
        through to the end before training goes on.
        """
        return read_state(self.model.network, self.partition, self.tensors)

    def initialize(self, seed: int) -> None:
        """Set masters and weights to the initial values of ``seed``; each rank draws what it holds. Collective.

        The optimiser starts afresh. Values are those of ``Decoder.initialize``, rounded to the dtype of the weights.
        """
        config, parameters = self.model.network.config, self.tensors.parameters
        initial = InitialWeights(config, parameters, seed=seed, dtype=self.dtype)
        self.load(initial.read, step=0, moments=False)

    def load(self, read: ReadRange, *, step: int, moments: bool = True) -> None:
        """Set weights, masters, moments and buffers from ``read``, as after ``step`` optimiser steps. Collective.

        Over all ranks every value is read once. Without ``moments`` the optimiser starts afresh.
        """
        write_state(self.model.network, self.partition, self.tensors, read, step=step, moments=moments)

    def _broken_gradients(self) -> Tensor:
        """Which of the tensors in ``shapes`` have a gradient that is not finite in this rank's part; on its device."""
        parts = dict(self.partition.local_gradients())
        device = self.partition.engine.device
        nothing = torch.zeros(0, device=device)
        return not_finite((parts.get(name, nothing) for name in self.shapes), device)


def _before_layer(layer: nn.Module, inputs: tuple, named: dict[str, Any]) -> None:
    """Say which layer is computed, should the run hang there."""
    enter_layer(named["call"].layer)

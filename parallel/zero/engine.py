"""``ZeroEngine``: a module under ZeRO, the same to its callers in every stage.

DeepSpeed is given no mpu, no mesh and no sequence-parallel size: it averages gradients over all ranks, and the loss is
scaled once by their number. Every other set-up of this version is wrong in some stage (see
docs/decisions/2026-11-deepspeed-grouping.md). If experts are spread over ranks, it learns so from marks on their
weights and from a module of a class that it looks for (docs/decisions/2026-11-expert-parallel.md).
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
    """``Task`` under ZeRO: micro-batches in, one optimiser step out, in every stage."""

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

        The decoder's dispatcher decides which experts are on this rank. A model on the meta device gets memory for this
        rank's part of it, which ``initialize`` or ``load`` must set.
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
                matrices=matrices_of(model.network) if options.name == "muon" else {},
            )
        )

    @property
    def model(self) -> Task:
        """Wrapped module, for evaluation without gradients."""
        return self.partition.engine.module

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the full model, each counted once."""
        return sum(shape.numel() for shape in self.tensors.parameters.values())

    @property
    def roles(self) -> dict[str, tuple[str, ...]]:
        """Roles that are kept of every parameter and buffer of the full model, by name."""
        kept = {name: self.partition.roles(name) for name in self.tensors.parameters}
        return kept | dict.fromkeys(self.tensors.buffers, ROLES[:1])

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every parameter and buffer of the full model, by name."""
        return self.tensors.shapes

    def forward(self, batch: Batch, training_pass: TrainingPass | None = None) -> LossSum:
        """Run the module's forward on this rank's shard of a micro-batch."""
        begin("forward")
        return self.model.loss_sum(self.partition.engine(batch, training_pass))

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of this rank's part of the step's loss; they accumulate over micro-batches."""
        begin("backward")
        engine = self.partition.engine
        # The loss is divided by the step's global count already, and DeepSpeed averages over all ranks: undo the mean.
        engine.backward(loss * num_ranks(), scale_wrt_gas=False)
        if not engine.is_gradient_accumulation_boundary():
            engine.step()  # counts the micro-batch; updates nothing

    def step(self, lr: float, accept: Accept = everything) -> float:
        """Clip, update with this learning rate and clear the gradients; return the gradient norm before clipping.

        Raise GradientError on every rank if that norm is not finite, or if ``accept`` refuses it; ``accept`` must give
        the same answer on every rank. Weights and moments are then as before, in every stage, and gradients cleared:
        the next step may follow. Collective.
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
        """Return the names of the parameters and buffers with a value that is not finite. Collective."""
        # Each rank checks its own part; the reduction inside makes the answer the same on all ranks.
        device, found = self.partition.engine.device, {}
        for name, buffer in self.model.network.named_buffers():
            found[name] = not_finite([buffer], device)
        for name, p in self.model.network.named_parameters():
            # One at a time: a part may have to be read from a disk.
            found[name] = not_finite([self.partition.working_part(name, p)], device)
        return named_on_any_rank(torch.cat([found[name] for name in self.shapes]), self.shapes)

    def owned_pieces(self) -> list[Piece]:
        """Return the ranges of the full model's tensors that ``owned_ranges`` yields, without reading them."""
        return owned_pieces(self.model.network, self.partition, self.tensors)

    def owned_ranges(self) -> Generator[OwnedRange]:
        """Yield master weights, moments and buffers as fp32 ranges of the full model's tensors.

        Over all ranks every value comes exactly once. A range that a disk holds is in memory until the next one is
        requested: iterate to the end before training continues.
        """
        return read_state(self.model.network, self.partition, self.tensors)

    def initialize(self, seed: int) -> None:
        """Set masters and weights to the initial values of ``seed``; each rank draws its own part. Collective.

        The optimiser is reset. Values are those of ``Decoder.initialize``, rounded to the dtype of the weights.
        """
        config, parameters = self.model.network.config, self.tensors.parameters
        initial = InitialWeights(config, parameters, seed=seed, dtype=self.dtype)
        self.load(initial.read, step=0, moments=False)

    def load(self, read: ReadRange, *, step: int, moments: bool = True) -> None:
        """Set weights, masters, moments and buffers from ``read``, as after ``step`` optimiser steps. Collective.

        Over all ranks every value is read once. Without ``moments`` the optimiser is reset.
        """
        write_state(self.model.network, self.partition, self.tensors, read, step=step, moments=moments)

    def _broken_gradients(self) -> Tensor:
        """Return a mask over ``shapes`` of the gradients that are not finite in this rank's part; on its device."""
        parts = dict(self.partition.local_gradients())
        device = self.partition.engine.device
        nothing = torch.zeros(0, device=device)
        return not_finite((parts.get(name, nothing) for name in self.shapes), device)


def _before_layer(layer: nn.Module, inputs: tuple, named: dict[str, Any]) -> None:
    """Mark the layer that is computed, in case the run hangs there."""
    enter_layer(named["call"].layer)

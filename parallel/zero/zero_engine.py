"""``ZeroEngine``: a module under ZeRO, with the same interface in every stage.

DeepSpeed gets no mpu, no mesh and no sequence-parallel size: it averages gradients over all ranks, and the loss is
multiplied once by the world size. Every other setup in this version is wrong in some stage (see
docs/decisions/2026-11-deepspeed-grouping.md). If experts are sharded, it detects them by marks on their weights and by
the class of a module (docs/decisions/2026-11-expert-parallel.md).
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
from parallel.runtime.activity import begin, enter_layer
from parallel.zero.deepspeed_config import quiet_deepspeed
from parallel.zero.gradients import UpdateCheck, always_update, named_on_any_rank, not_finite
from parallel.zero.model_tensors import ModelTensors, mark_experts
from parallel.zero.optimizer import OptimizerOptions, import_muon
from parallel.zero.partition import Wrapping
from parallel.zero.stages import PARTITIONS
from parallel.zero.zero_muon import matrices_of
from parallel.zero.zero_options import ZeroOptions, check_zero
from parallel.zero.zero_state import (
    InitialWeights,
    OwnedRange,
    ReadRange,
    StatePiece,
    owned_pieces,
    read_state,
    write_state,
)


class ZeroEngine:
    """``Task`` under ZeRO: micro-batches in, one optimizer step out, in every stage."""

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
        """Wrap the module with DeepSpeed. ``accumulation`` micro-batches make a step.

        The decoder's dispatcher decides which experts are on this rank. A meta model gets memory for this rank's
        partition, which ``initialize`` or ``load`` must fill.
        """
        check_zero(stage, dtype)
        quiet_deepspeed()
        import_muon()
        networks = [stack for stack in (model.network.model, model.network.encoder) if stack is not None]
        blocks = [layer for stack in networks for layer in stack.layers]
        blocks.extend(mtp_layer.block for stack in networks for mtp_layer in stack.mtp)
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
                # Before partitioning, which removes the shapes that identify matrices.
                matrices=matrices_of(model.network) if options.name == "muon" else {},
            )
        )

    @property
    def model(self) -> Task:
        """Wrapped module, for evaluation without gradients."""
        return self.partition.engine.module

    @property
    def num_parameters(self) -> int:
        """Number of parameters in the full model, each counted once."""
        return sum(shape.numel() for shape in self.tensors.parameters.values())

    @property
    def roles(self) -> dict[str, tuple[str, ...]]:
        """State roles (master weight, moments) stored for every trained parameter, and every buffer, by name."""
        kept = {name: self.partition.roles(name) for group in self.partition.groups() for name, _ in group}
        return kept | dict.fromkeys(self.tensors.buffers, ROLES[:1])

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every parameter and buffer in the full model, by name."""
        return self.tensors.shapes

    def forward(self, batch: Batch, training_pass: TrainingPass | None = None) -> LossSum:
        """Run the module's forward on this rank's micro-batch shard."""
        begin("forward")
        return self.model.loss_sum(self.partition.engine(batch, training_pass))

    def backward(self, loss: Tensor) -> None:
        """Compute gradients for this rank's part of the step's loss; they accumulate over micro-batches."""
        begin("backward")
        engine = self.partition.engine
        # The loss is already divided by the step's global count, and DeepSpeed averages over ranks: undo that mean.
        engine.backward(loss * num_ranks(), scale_wrt_gas=False)
        if not engine.is_gradient_accumulation_boundary():
            engine.step()  # counts the micro-batch; updates no weight

    def step(self, lr: float, should_update: UpdateCheck = always_update) -> float:
        """Clip, update with this learning rate and clear the gradients; return the gradient norm before clipping.

        Raise GradientError on every rank if the norm is not finite, or if ``should_update`` rejects it;
        ``should_update`` must return the same value on every rank. Weights and moments are then unchanged, in every
        stage, and gradients cleared, so the next step may follow. Collective.
        """
        begin("optimizer step")
        for group in self.partition.engine.optimizer.param_groups:
            group["lr"] = lr
        # Before the update, which frees the gradients. The mask is small and stays on the device: it is read only if
        # the norm is not finite.
        nonfinite = self._nonfinite_gradients()
        norm, taken = self.partition.update(should_update)
        if not taken:
            names = [] if math.isfinite(norm) else named_on_any_rank(nonfinite, self.shapes)
            raise GradientError(norm, names)
        return norm

    def nonfinite_weights(self) -> list[str]:
        """Return the names of parameters and buffers with a non-finite value. Collective."""
        # Each rank checks its own partition; the all-reduce makes the result equal on all ranks.
        device, found = self.partition.engine.device, {}
        for name, buffer in self.model.network.named_buffers():
            found[name] = not_finite([buffer], device)
        for name, p in self.model.network.named_parameters():
            # One at a time: a partition may have to be read from disk.
            found[name] = not_finite([self.partition.working_part(name, p)], device)
        return named_on_any_rank(torch.cat([found[name] for name in self.shapes]), self.shapes)

    def owned_pieces(self) -> list[StatePiece]:
        """List the ranges that ``owned_ranges`` yields, without reading them."""
        return owned_pieces(self.model.network, self.partition, self.tensors)

    def owned_ranges(self) -> Generator[OwnedRange]:
        """Yield master weights, moments and buffers as fp32 ranges in the full model's tensors.

        Over all ranks every value is yielded exactly once. A range offloaded to disk stays in memory until the next one
        is requested: exhaust the iterator before training continues.
        """
        return read_state(self.model.network, self.partition, self.tensors)

    def initialize(self, seed: int) -> None:
        """Set masters and weights to the initial values for ``seed``; each rank generates its own partition.
        Collective.

        The optimizer is reset. Values equal ``Decoder.initialize``, rounded to the weights' dtype.
        """
        network, parameters = self.model.network, self.tensors.parameters
        initial = InitialWeights(
            network.config, parameters, seed=seed, dtype=self.dtype, unrounded=network.layouts.keys()
        )
        self.load(initial.read, step=0, moments=False)

    def load(self, read: ReadRange, *, step: int, moments: bool = True) -> None:
        """Set weights, masters, moments and buffers from ``read``, as after ``step`` optimizer steps. Collective.

        Over all ranks every value is read once. Without ``moments`` the optimizer is reset.
        """
        write_state(self.model.network, self.partition, self.tensors, read, step=step, moments=moments)

    def _nonfinite_gradients(self) -> Tensor:
        """Return a mask over ``shapes``, on the device: gradients that are not finite in this rank's partition."""
        parts = dict(self.partition.local_gradients())
        device = self.partition.engine.device
        empty = torch.zeros(0, device=device)
        return not_finite((parts.get(name, empty) for name in self.shapes), device)


def _before_layer(layer: nn.Module, inputs: tuple, named: dict[str, Any]) -> None:
    """Mark the computed layer, in case the run hangs in it."""
    enter_layer(named["call"].layer)

"""The tensors of a model under ZeRO: their shapes in the whole model and on this rank, and who answers for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longctx.model.decoder import Decoder
from longctx.model.experts.experts import is_expert_weight
from parallel.comm.groups import ProcessGroup, world_group
from parallel.comm.world import num_ranks, own_rank
from parallel.zero.experts import ExpertsAcrossRanks


@dataclass(frozen=True, kw_only=True)
class ModelTensors:
    """Names and shapes, taken before DeepSpeed partitions anything."""

    parameters: dict[str, torch.Size]
    """Shape of every parameter of the whole model."""
    local: dict[str, torch.Size]
    """The same as this rank holds them before ZeRO: of the experts its own alone."""
    buffers: dict[str, torch.Size]
    experts: ExpertsAcrossRanks | None
    """How experts are spread over ranks; None where each holds them all."""

    @classmethod
    def of(cls, decoder: Decoder, experts: ExpertsAcrossRanks | None) -> ModelTensors:
        """The tensors of a decoder that no optimiser has touched yet."""
        local = {name: p.shape for name, p in decoder.named_parameters()}
        return cls(
            parameters={name: torch.Size(decoder.logical_shape(name, shape)) for name, shape in local.items()},
            local=local,
            buffers={name: buffer.shape for name, buffer in decoder.named_buffers()},
            experts=experts,
        )

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every parameter and buffer of the whole model, by name."""
        return {**self.parameters, **self.buffers}

    def first_value(self, name: str) -> int:
        """Where this rank's part of a flattened tensor of the whole model starts."""
        if self.experts is None or not is_expert_weight(name):
            return 0
        return self.experts.ep_rank * self.local[name].numel()

    def replicas(self, name: str) -> ProcessGroup | None:
        """The ranks that hold the same values of a parameter as this one before ZeRO; None where it is the only one."""
        group = world_group()
        if self.experts is not None and is_expert_weight(name):
            group = self.experts.replicas
        if group.size() == 1:
            return None
        return group

    def answers_for(self, index: int, name: str) -> bool:
        """Whether this rank is the one, of those that hold the same values, that gives the ``index``-th tensor."""
        # Neighbouring ranks hold different experts, so only every degree-th rank has the same values.
        degree = 1
        if self.experts is not None and is_expert_weight(name):
            degree = self.experts.ep_size
        return index % (num_ranks() // degree) == own_rank() // degree

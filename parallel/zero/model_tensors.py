"""A model's tensors under ZeRO: shapes, owning ranks, and sharded experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.utils import groups
from torch import nn

from longctx.model.decoder import Decoder
from longctx.model.experts.experts import is_expert_weight
from longctx.objectives.task import Task
from parallel.comm.process_groups import ProcessGroup, world_group
from parallel.comm.world import num_ranks, own_rank


class ExpertsAcrossRanks(AutoEPMoELayer):
    """Module by which DeepSpeed recognizes marked weights as experts: it searches for this class. It computes nothing.

    DeepSpeed queries it for process groups: every ``degree`` neighbouring ranks hold all experts; ranks with the same
    experts (equal position among their neighbours) average and partition them.
    """

    def __init__(self, num_experts: int, degree: int) -> None:
        nn.Module.__init__(self)  # router, weights and dispatch are ours
        self.num_experts, self.num_local_experts = num_experts, num_experts // degree
        self.ep_size, self.ep_rank = degree, own_rank() % degree
        self.ep_group_name = f"ep_size_{degree}"
        self.ep_group = None

    @property
    def replicas(self) -> ProcessGroup:
        """Ranks that hold the same experts as this one; exists once DeepSpeed has started."""
        return groups._get_expert_data_parallel_group(self.ep_group_name)

    def mark(self, weight: nn.Parameter) -> None:
        """Make DeepSpeed treat this weight as an expert."""
        # Attributes that DeepSpeed's ZeRO stages and gradient reduction read from a parameter.
        marks = {
            "allreduce": False,
            "group_name": self.ep_group_name,
            "ds_zero_placement_family": "autoep_expert",
            "ds_zero_partition_group_name": self.ep_group_name,
        }
        for name, value in marks.items():
            setattr(weight, name, value)


def mark_experts(model: Task) -> ExpertsAcrossRanks | None:
    """Mark expert weights if they are sharded over ranks; return None if every rank holds all experts."""
    num_experts = model.network.config.num_experts
    own = range(num_experts)[model.network.dispatcher.local_experts]
    if len(own) == num_experts:
        return None
    experts = ExpertsAcrossRanks(num_experts, num_experts // len(own))
    assert own.start == experts.ep_rank * len(own), "DeepSpeed expects neighbouring ranks to hold neighbouring experts"
    for name, p in model.network.named_parameters():
        if is_expert_weight(name):
            experts.mark(p)
    # DeepSpeed finds it among the wrapped module's children.
    model.add_module("experts_across_ranks", experts)
    return experts


@dataclass(frozen=True, kw_only=True)
class ModelTensors:
    """Tensor names and shapes, recorded before DeepSpeed partitions them."""

    parameters: dict[str, torch.Size]
    """Shape of every parameter in the full model."""
    local: dict[str, torch.Size]
    """Shape of every parameter on this rank before ZeRO: with local experts only, and of bytes if it is quantized."""
    buffers: dict[str, torch.Size]
    experts: ExpertsAcrossRanks | None
    """Expert sharding; None if every rank holds all experts."""

    @classmethod
    def of(cls, decoder: Decoder, experts: ExpertsAcrossRanks | None) -> ModelTensors:
        """Record the tensors of a decoder before an optimizer wraps it."""
        local = {name: p.shape for name, p in decoder.named_parameters()}
        return cls(
            parameters={name: torch.Size(decoder.logical_shape(name, shape)) for name, shape in local.items()},
            local=local,
            buffers={name: buffer.shape for name, buffer in decoder.named_buffers()},
            experts=experts,
        )

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every parameter and buffer of the full model, by name."""
        return {**self.parameters, **self.buffers}

    def first_value(self, name: str) -> int:
        """Return the index at which this rank's values start in a flattened tensor of the full model."""
        if self.experts is None or not is_expert_weight(name):
            return 0
        local_experts = self.local[name][0]
        return self.experts.ep_rank * local_experts * self.parameters[name][1:].numel()

    def replicas(self, name: str) -> ProcessGroup | None:
        """Return the ranks that hold the same parameter values before ZeRO; None if there are no others."""
        group = world_group()
        if self.experts is not None and is_expert_weight(name):
            group = self.experts.replicas
        if group.size() == 1:
            return None
        return group

    def answers_for(self, index: int, name: str) -> bool:
        """Return True if this rank, among those with the same values, provides the ``index``-th tensor."""
        # Neighbouring ranks hold different experts, so only every degree-th rank has the same values.
        degree = 1
        if self.experts is not None and is_expert_weight(name):
            degree = self.experts.ep_size
        return index % (num_ranks() // degree) == own_rank() // degree

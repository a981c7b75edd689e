"""How DeepSpeed learns of experts that are spread over ranks."""

from __future__ import annotations

from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.utils import groups
from torch import nn

from longctx.model.experts.experts import is_expert_weight
from longctx.objectives.task import Task
from parallel.comm.groups import ProcessGroup
from parallel.comm.world import own_rank


class ExpertsAcrossRanks(AutoEPMoELayer):
    """What DeepSpeed looks for to treat marked weights as experts: a module of that class. It computes nothing.

    DeepSpeed asks it for the process groups: each ``degree`` neighbouring ranks hold all experts, and the ranks that
    hold the same ones (ranks of the same number among their neighbours) average and partition them.
    """

    def __init__(self, num_experts: int, degree: int) -> None:
        nn.Module.__init__(self)  # router, weights and dispatch are ours
        self.num_experts, self.num_local_experts = num_experts, num_experts // degree
        self.ep_size, self.ep_rank = degree, own_rank() % degree
        self.ep_group_name = f"ep_size_{degree}"
        self.ep_group = None

    @property
    def replicas(self) -> ProcessGroup:
        """The ranks that hold the same experts as this one; they are there once DeepSpeed has started."""
        return groups._get_expert_data_parallel_group(self.ep_group_name)

    def mark(self, weight: nn.Parameter) -> None:
        """Have DeepSpeed treat this weight as one of the experts."""
        # The names that DeepSpeed's ZeRO stages and gradient reduction read off a parameter.
        marks = {
            "allreduce": False,
            "group_name": self.ep_group_name,
            "ds_zero_placement_family": "autoep_expert",
            "ds_zero_partition_group_name": self.ep_group_name,
        }
        for name, value in marks.items():
            setattr(weight, name, value)


def mark_experts(model: Task) -> ExpertsAcrossRanks | None:
    """Mark the experts' weights where they are spread over ranks; None where every rank holds them all."""
    num_experts = model.network.config.num_experts
    own = range(num_experts)[model.network.dispatcher.local_experts]
    if len(own) == num_experts:
        return None
    experts = ExpertsAcrossRanks(num_experts, num_experts // len(own))
    assert own.start == experts.ep_rank * len(own), "DeepSpeed takes neighbouring ranks to hold neighbouring experts"
    for name, p in model.network.named_parameters():
        if is_expert_weight(name):
            experts.mark(p)
    # DeepSpeed finds it among the modules of the one it wraps.
    model.add_module("experts_across_ranks", experts)
    return experts

"""Stage 3: every rank holds a part of each weight, with its master, moments and gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn

from longctx.checkpoint_format import ROLES
from longctx.model.block import Block
from parallel.zero.gradients import named_gradients
from parallel.zero.partition import MASTER, Part, Wrapping, fill_moments, masters_of, update_by_deepspeed


class Sharded:
    """Each parameter is cut into equal parts, one a rank; the last ones are padded."""

    def __init__(self, wrapping: Wrapping) -> None:
        self._model, self._tensors = wrapping.model, wrapping.tensors
        # Weights that another module's forward reads, such as a tied head: DeepSpeed has to gather them there too.
        for module, parameter in wrapping.model.decoder.external_parameters():
            deepspeed.zero.register_external_parameter(module, parameter)
        # A compiled graph spans modules, and no hook runs inside of it: a block's weights are gathered before it.
        if wrapping.model.decoder.execution.compiler is not None:
            set_z3_leaf_modules(wrapping.model, [Block])
        self._offloads = wrapping.zero.offload != "none"
        self.engine = wrapping.start(clip_norm=wrapping.options.clip_norm)

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.engine.optimizer.optimizer

    def update(self) -> float:
        return update_by_deepspeed(self.engine)

    def local_gradients(self) -> Iterator[tuple[str, Tensor]]:
        zero = self.engine.optimizer
        if not self._offloads:
            yield from named_gradients(self._model.decoder, zero.fp16_groups, zero.averaged_gradients)
            return
        for name, p in self._model.decoder.named_parameters():
            group, start, count = zero.grad_position[zero.get_param_id(p)]
            yield name, zero.fp32_partitioned_groups_flat[group].grad.narrow(0, start, count)

    def part(self, name: str, p: nn.Parameter, roles: Sequence[str] = ROLES) -> Part:
        # Where they live: DeepSpeed's own functions would give copies on the GPU of what is offloaded.
        zero = self.engine.optimizer
        group, first, count = zero.grad_position[zero.get_param_id(p)]
        flat = zero.fp32_partitioned_groups_flat[group]
        values = {MASTER: flat.narrow(0, first, count)}
        for role in roles:
            if role != MASTER:
                values[role] = self.inner.state[flat][role].narrow(0, first, count)
        # Equal parts by rank: the range of the last ones may lie behind the parameter's end, as padding.
        start = p.ds_zero_partition_rank * count  # type: ignore[attr-defined]
        return Part(start, self._num_own(name, p, count), values)

    def replicas(self, name: str) -> dist.ProcessGroup | None:
        return None

    def answers_for(self, index: int, name: str) -> bool:
        return True

    def working_part(self, name: str, p: nn.Parameter) -> Tensor:
        part = p.ds_tensor  # type: ignore[attr-defined]
        return part[: self._num_own(name, p, part.numel())]

    def refresh_weights(self) -> None:
        zero = self.engine.optimizer
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        # What was gathered of the old weights, or copied within a node, is gathered anew where it is needed.
        zero.invalidate_secondary_tensor()
        for p in self._model.parameters():
            if p.ds_status == ZeroParamStatus.AVAILABLE:  # type: ignore[attr-defined]
                p.partition()  # type: ignore[attr-defined]

    def prime_moments(self) -> None:
        # The optimiser is given one flat group at a time during a step: between steps it names none of them.
        fill_moments(self.inner, masters_of(self.inner) + list(self.engine.optimizer.fp32_partitioned_groups_flat))

    def _num_own(self, name: str, p: nn.Parameter, part_numel: int) -> int:
        """Values of this rank's part that belong to the parameter; what follows is padding."""
        start = p.ds_zero_partition_rank * part_numel  # type: ignore[attr-defined]
        return max(0, min(part_numel, self._tensors.local[name].numel() - start))

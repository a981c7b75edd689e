"""Stage 3: every rank holds a part of each weight, with its master, moments and gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn

from longctx.checkpoint_format import ROLES
from longctx.model.block import Block
from longctx.model.decoder import external_parameters
from parallel.comm.groups import ProcessGroup
from parallel.zero.gradients import named_gradients
from parallel.zero.partition import MASTER, Extent, Wrapping, fill_moments, update_by_deepspeed
from parallel.zero.refusal import Accept
from parallel.zero.weight_swapper import WeightSwapper


class Sharded:
    """Each parameter is cut into equal parts, one a rank; the last ones are padded."""

    def __init__(self, wrapping: Wrapping) -> None:
        self._model, self._tensors = wrapping.model, wrapping.tensors
        # Weights that another module's forward reads, such as a tied head: DeepSpeed has to gather them there too.
        for module, parameter in external_parameters(wrapping.model.network):
            deepspeed.zero.register_external_parameter(module, parameter)
        # A compiled graph spans modules, and no hook runs inside of it; and chunks would gather weights once each. A
        # block's weights are gathered before all of it.
        execution = wrapping.model.network.execution
        if execution.compiler is not None or execution.chunk_tokens:
            set_z3_leaf_modules(wrapping.model, [Block])
        self._offloads = wrapping.zero.offload != "none"
        self.engine = wrapping.start(clip_norm=wrapping.options.clip_norm)

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.engine.optimizer.optimizer

    def update(self, accept: Accept) -> tuple[float, bool]:
        # DeepSpeed takes a weight that it finds in memory to be there for good, also one that it has read ahead.
        if self._swapper is not None:
            self._swapper.release_all()
        return update_by_deepspeed(self.engine, accept)

    def local_gradients(self) -> Iterator[tuple[str, Tensor]]:
        zero = self.engine.optimizer
        if not self._offloads:
            yield from named_gradients(self._model.network, zero.fp16_groups, zero.averaged_gradients)
            return
        # What it hands on, to AdamW's copy or to a disk, stays here.
        start = 0
        for group in self.groups():
            for name, p in group:
                count = p.partition_numel()  # type: ignore[attr-defined]
                yield name, zero.grad_partitions_flat_buffer.narrow(0, start, count)
                start += count

    def extent(self, name: str, p: nn.Parameter) -> Extent:
        _, _, count = self._position(p)
        # Equal parts by rank: the range of the last ones may lie behind the parameter's end, as padding.
        start = p.ds_zero_partition_rank * count  # type: ignore[attr-defined]
        return Extent(start, self._num_own(name, p, count))

    def groups(self) -> list[list[tuple[str, nn.Parameter]]]:
        # DeepSpeed's sub-groups: what it updates at once, and reads from a disk at once.
        names = {id(p): name for name, p in self._model.network.named_parameters()}
        return [[(names[id(p)], p) for p in group] for group in self.engine.optimizer.fp16_groups]

    @contextmanager
    def resident(self, group: int, *, moments: bool, writes: bool = False) -> Iterator[None]:
        zero = self.engine.optimizer
        # The optimiser is given one flat group at a time during a step: between steps it names none of them.
        flat = zero.fp32_partitioned_groups_flat[group]
        is_swapped = zero._swappable_optimizer_subgroup(group)
        if is_swapped:
            zero.optimizer_swapper.swap_in_optimizer_state(parameter=flat)
        # New moments have no place on the disk yet.
        keeps = is_swapped and (writes or (moments and not self.inner.state[flat]))
        try:
            if moments:
                fill_moments(self.inner, [flat])
            yield
            if writes:
                self._forget_weights(group)
                zero._reassign_or_swap_out_partitioned_parameters(group)
            if keeps:
                zero._optimizer_states_and_gradient_swap_out(group)
        finally:
            # Also after an error, and nothing where it was written.
            if is_swapped:
                zero._release_swap_buffers(group)

    def part(self, name: str, p: nn.Parameter, roles: Sequence[str] = ROLES) -> dict[str, Tensor]:
        # Where they live: DeepSpeed's own functions would give copies on the GPU of what is offloaded.
        group, first, count = self._position(p)
        flat = self.engine.optimizer.fp32_partitioned_groups_flat[group]
        values = {MASTER: flat.narrow(0, first, count)}
        for role in roles:
            if role != MASTER:
                values[role] = self.inner.state[flat][role].narrow(0, first, count)
        return values

    def replicas(self, name: str) -> ProcessGroup | None:
        return None

    def answers_for(self, index: int, name: str) -> bool:
        return True

    def alike(self, name: str, p: nn.Parameter) -> dict[str, Tensor]:
        # What a rank gathers of the others lasts for a few layers; of what it keeps it is the only one.
        return {}

    def working_part(self, name: str, p: nn.Parameter) -> Tensor:
        part = p.ds_tensor  # type: ignore[attr-defined]
        if self._swapper is not None and part.final_location == "nvme":
            part = self._swapper.part(p)
        return part[: self._num_own(name, p, part.numel())]

    def refresh_weights(self) -> None:
        # What was copied within a node is gathered anew where it is needed.
        self.engine.optimizer.invalidate_secondary_tensor()

    @property
    def _swapper(self) -> WeightSwapper | None:
        """What reads and writes weights on a disk; None where none are there."""
        return next(self._model.parameters()).nvme_swapper  # type: ignore[attr-defined]

    def _forget_weights(self, group: int) -> None:
        """Free what is gathered, or read ahead, of a sub-group's old weights."""
        for p in self.engine.optimizer.fp16_groups[group]:
            if p.ds_status == ZeroParamStatus.AVAILABLE:
                p.partition()
        if self._swapper is not None:
            self._swapper.release_all()

    def _position(self, p: nn.Parameter) -> tuple[int, int, int]:
        """(sub-group, first value in it, values with padding) of this rank's part of a parameter."""
        zero = self.engine.optimizer
        return zero.grad_position[zero.get_param_id(p)]

    def _num_own(self, name: str, p: nn.Parameter, part_numel: int) -> int:
        """Values of this rank's part that belong to the parameter; what follows is padding."""
        start = p.ds_zero_partition_rank * part_numel  # type: ignore[attr-defined]
        return max(0, min(part_numel, self._tensors.local[name].numel() - start))

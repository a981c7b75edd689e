"""Partitions by ZeRO stage: full on every rank, in flat buffers across ranks, or each tensor sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn

from longctx.checkpoint_format import ROLES
from longctx.model.block import Block
from longctx.model.experts.experts import is_expert_weight
from longctx.model.mtp import MtpJoin
from parallel.comm.communicator import Communicator
from parallel.comm.process_groups import ProcessGroup
from parallel.zero.gradients import UpdateCheck, named_gradients
from parallel.zero.optimizer import MASTER, MOMENTS, fill_moments, masters_of
from parallel.zero.partition import WORKING, Extent, Partition, Wrapping
from parallel.zero.swapping import WeightSwapper


class ReplicatedPartition(Partition):
    """Stage 0: every rank holds full weights, masters, moments and gradients; a weight is its own master."""

    is_whole = True

    def __init__(self, wrapping: Wrapping) -> None:
        self._clip_norm, clip_norm = 0.0, wrapping.options.clip_norm
        # DeepSpeed would clip by a mean over norms that each exclude remote experts: clip here instead.
        if wrapping.tensors.experts is not None:
            self._clip_norm, clip_norm = clip_norm, 0.0
        super().__init__(wrapping, clip_norm)

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.engine.optimizer

    def update(self, should_update: UpdateCheck) -> tuple[float, bool]:
        """Check the norm first: DeepSpeed would update even with a non-finite gradient."""
        # Gradients are averaged, so the norm is equal on every rank: either all update, or all skip.
        norm = self._gradient_norm()
        taken = math.isfinite(norm) and should_update(norm)
        if taken:
            self._clip_gradients(norm)
            self.engine.step()
        else:
            # Skip: DeepSpeed counts the step's micro-batches and clears their gradients, while its optimizer does no
            # update.
            self.engine.optimizer.step, update = _skip_update, self.engine.optimizer.step
            try:
                self.engine.step()
            finally:
                self.engine.optimizer.step = update
        return norm, taken

    def local_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self._model.network.named_parameters():
            if p.grad is not None:
                yield name, p.grad

    def extent(self, name: str, p: nn.Parameter) -> Extent:
        return Extent(0, p.numel())

    def flat_buffers(self) -> Iterator[tuple[Tensor, Sequence[tuple[str, nn.Parameter]]]]:
        for group in self.groups():
            for name, p in group:
                yield p, [(name, p)]

    def part(self, name: str, p: nn.Parameter, roles: Sequence[str] = ROLES) -> dict[str, Tensor]:
        values = {MASTER: p.data.view(-1)}
        for role in roles:
            if role != MASTER:
                values[role] = self.inner.state[p][role].view(-1)
        return values

    def replicas(self, name: str) -> ProcessGroup | None:
        return self._tensors.replicas(name)

    def answers_for(self, index: int, name: str) -> bool:
        return self._tensors.answers_for(index, name)

    def replicated_tensors(self, name: str, p: nn.Parameter) -> dict[str, Tensor]:
        if self._tensors.replicas(name) is None:
            return {}
        found = {MASTER: p.detach()}
        if not p.requires_grad:
            return found
        # Moments exist only after the first step.
        found.update((moment, self.inner.state[p][moment]) for moment in MOMENTS if moment in self.inner.state[p])
        return found

    def refresh_weights(self) -> None:
        """Do nothing: forward reads the masters."""

    def _gradient_norm(self) -> float:
        """Return the gradient norm, which DeepSpeed does not report. Gradients are full, averaged over holders."""
        gradients = {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}
        experts = self._tensors.experts
        if experts is None:
            return float(torch.nn.utils.get_total_norm(gradients.values()))
        # Every rank has the same gradients for shared weights, but expert gradients only for its local experts.
        of_experts = [gradient for name, gradient in gradients.items() if is_expert_weight(name)]
        of_others = [gradient for name, gradient in gradients.items() if not is_expert_weight(name)]
        norms = [torch.nn.utils.get_total_norm(part) for part in (of_others, of_experts)]
        squares = torch.stack([norm.double() ** 2 for norm in norms])
        assert experts.ep_group is not None
        Communicator().all_reduce(squares[1], experts.ep_group, operation="summing expert gradient norms")
        return float(squares.sum().sqrt())

    def _clip_gradients(self, norm: float) -> None:
        """Scale gradients with this norm down to ``clip_norm``; DeepSpeed does it if experts are not sharded."""
        if self._clip_norm <= 0 or norm + 1e-6 <= self._clip_norm:
            return
        factor = self._clip_norm / (norm + 1e-6)
        for p in self._model.parameters():
            if p.grad is not None:
                p.grad.mul_(factor)


def _skip_update() -> None:
    """Replace the optimizer update in a skipped step."""


# Stages 1 and 2: DeepSpeed concatenates a group's parameters into one flat buffer and gives each rank an equal range,
# so a range may begin and end inside a parameter. ``_hp_mapping`` links a parameter to the slice inside this rank's
# range.
class FlatPartition(Partition):
    """Stages 1 and 2: full weights on every rank, and one range per flat buffer of masters and moments.

    In stage 2 gradients are partitioned in flat buffers, too.
    """

    def __init__(self, wrapping: Wrapping) -> None:
        super().__init__(wrapping, wrapping.options.clip_norm)
        # In stage 1 with bfloat16 DeepSpeed uses a different optimizer class, which keeps full gradients.
        self._keeps_whole_gradients = wrapping.stage == 1 and wrapping.dtype == torch.bfloat16 and not self._offloads

    def local_gradients(self) -> Iterator[tuple[str, Tensor]]:
        # Both lists are per parameter group, in the group's order.
        zero = self.engine.optimizer
        if self._offloads:
            # Copies to CPU memory may still be in flight.
            zero._wait_for_offload_copies()
            groups, gradients = zero.params_in_partition, zero.offload_gradient_dict
        elif self._keeps_whole_gradients:
            groups, gradients = zero.bf16_groups, zero.fp32_groups_gradients
        else:
            groups, gradients = zero.params_in_partition, zero.averaged_gradients
        return named_gradients(self._model.network, groups, gradients)

    def flat_buffers(self) -> Iterator[tuple[Tensor, Sequence[tuple[str, nn.Parameter]]]]:
        names = {id(p): name for name, p in self._model.network.named_parameters()}
        zero = self.engine.optimizer
        groups = zero.bf16_groups if hasattr(zero, "bf16_groups") else zero.bit16_groups
        for flat, group in zip(masters_of(self.inner), groups, strict=True):
            yield flat, [(names[id(p)], p) for p in group]

    def extent(self, name: str, p: nn.Parameter) -> Extent:
        fragment = p._hp_mapping  # type: ignore[attr-defined]
        if fragment is None:  # entirely in other ranks' ranges
            return Extent(0, 0)
        address = fragment.lp_fragment_address
        return Extent(address.start, address.numel)

    @contextmanager
    def in_memory(self, group: int, *, moments: bool, writes: bool = False) -> Iterator[None]:
        with super().in_memory(group, moments=moments):
            if moments:
                # DeepSpeed links parameters to their moment ranges only once, and these moments are new: link again.
                self.engine.optimizer._hp_optimizer_states_linked = False
                self.engine.optimizer._lazy_init_hp_params_optimizer_state()
            yield

    def part(self, name: str, p: nn.Parameter, roles: Sequence[str] = ROLES) -> dict[str, Tensor]:
        fragment = p._hp_mapping  # type: ignore[attr-defined]
        if fragment is None:
            return {}
        values = {MASTER: fragment.get_hp_fragment()}
        for role in roles:
            if role != MASTER:
                values[role] = fragment.get_hp_fragment(role)
        return values

    def replicated_tensors(self, name: str, p: nn.Parameter) -> dict[str, Tensor]:
        if self._tensors.replicas(name) is None:
            return {}
        return {WORKING: p.detach()}

    def refresh_weights(self) -> None:
        # Each rank rounds its own masters; one all-gather per flat buffer delivers the others'.
        self.engine.optimizer.update_lp_params()


class ShardedPartition(Partition):
    """Stage 3: every rank holds a shard of each weight, with its master, moments and gradient.

    Each parameter is cut into equal shards, one per rank; the last shards are padded.
    """

    def __init__(self, wrapping: Wrapping) -> None:
        # Weights read by another module's forward, such as a tied head: DeepSpeed must gather them there, too.
        for module, parameter in wrapping.model.network.external_parameters():
            deepspeed.zero.register_external_parameter(module, parameter)
        # Gather all weights in a block before it runs: a compiled graph spans modules without running their hooks, and
        # in chunked execution each chunk would gather again.
        execution = wrapping.model.network.execution
        if execution.compiler is not None or execution.chunk_tokens:
            leaves: list[type[nn.Module]] = [Block]
            if wrapping.model.network.config.mtp_layers:
                leaves.append(MtpJoin)
            set_z3_leaf_modules(wrapping.model, leaves)
        super().__init__(wrapping, wrapping.options.clip_norm)
        if wrapping.model.network.config.shared_layers:
            _reduce_when_complete(wrapping.model)

    def update(self, should_update: UpdateCheck) -> tuple[float, bool]:
        # Release weights that were read ahead: DeepSpeed assumes that a weight found in memory stays there.
        if self._swapper is not None:
            self._swapper.release_all()
        return super().update(should_update)

    def local_gradients(self) -> Iterator[tuple[str, Tensor]]:
        zero = self.engine.optimizer
        if not self._offloads:
            yield from named_gradients(self._model.network, zero.fp16_groups, zero.averaged_gradients)
            return
        # With offload, gradients handed to the CPU optimizer or to disk are also in this flat buffer.
        start = 0
        for group in self.groups():
            for name, p in group:
                count = p.partition_numel()  # type: ignore[attr-defined]
                yield name, zero.grad_partitions_flat_buffer.narrow(0, start, count)
                start += count

    def extent(self, name: str, p: nn.Parameter) -> Extent:
        _, _, count = self._position(p)
        # Equal shards by rank: the last ranges may extend past the parameter's end, as padding.
        start = p.ds_zero_partition_rank * count  # type: ignore[attr-defined]
        return Extent(start, self._num_own(name, p, count))

    def flat_buffers(self) -> Iterator[tuple[Tensor, Sequence[tuple[str, nn.Parameter]]]]:
        yield from zip(self.engine.optimizer.fp32_partitioned_groups_flat, self.groups(), strict=True)

    def groups(self) -> list[list[tuple[str, nn.Parameter]]]:
        # DeepSpeed's sub-groups: each is updated, and read from disk, as a unit.
        names = {id(p): name for name, p in self._model.network.named_parameters()}
        return [[(names[id(p)], p) for p in group] for group in self.engine.optimizer.fp16_groups]

    @contextmanager
    def in_memory(self, group: int, *, moments: bool, writes: bool = False) -> Iterator[None]:
        zero = self.engine.optimizer
        # The optimizer receives one flat group at a time during a step; between steps it has no groups.
        flat = zero.fp32_partitioned_groups_flat[group]
        is_swapped = zero._swappable_optimizer_subgroup(group)
        if is_swapped:
            zero.optimizer_swapper.swap_in_optimizer_state(parameter=flat)
        # New moments do not exist on disk yet, so they must be written.
        keeps = is_swapped and (writes or (moments and not self.inner.state[flat]))
        try:
            if moments:
                fill_moments(self.inner, [flat])
            yield
            if writes:
                self._release_weights(group)
                zero._reassign_or_swap_out_partitioned_parameters(group)
            if keeps:
                zero._optimizer_states_and_gradient_swap_out(group)
        finally:
            # Also after an error; a no-op if the buffers were written out.
            if is_swapped:
                zero._release_swap_buffers(group)

    def part(self, name: str, p: nn.Parameter, roles: Sequence[str] = ROLES) -> dict[str, Tensor]:
        # Access the originals: DeepSpeed's accessors would copy offloaded tensors to the GPU.
        group, first, count = self._position(p)
        flat = self.engine.optimizer.fp32_partitioned_groups_flat[group]
        values = {MASTER: flat.narrow(0, first, count)}
        for role in roles:
            if role != MASTER:
                values[role] = self.inner.state[flat][role].narrow(0, first, count)
        return values

    def working_part(self, name: str, p: nn.Parameter) -> Tensor:
        part = p.ds_tensor  # type: ignore[attr-defined]
        if self._swapper is not None and part.final_location == "nvme":
            part = self._swapper.part(p)
        return part[: self._num_own(name, p, part.numel())]

    def working_start(self, p: nn.Parameter) -> int:
        return p.ds_zero_partition_rank * p.ds_tensor.numel()  # type: ignore[attr-defined]

    def working_replicas(self, name: str) -> ProcessGroup | None:
        return None

    def refresh_weights(self) -> None:
        # Invalidate secondary copies within the node; they are gathered again on demand.
        self.engine.optimizer.invalidate_secondary_tensor()

    @property
    def _swapper(self) -> WeightSwapper | None:
        """Swapper for weights on disk; None without weight offload."""
        return next(self._model.parameters()).nvme_swapper  # type: ignore[attr-defined]

    def _release_weights(self, group: int) -> None:
        """Free gathered and prefetched tensors with a sub-group's old weights."""
        for p in self.engine.optimizer.fp16_groups[group]:
            if p.ds_status == ZeroParamStatus.AVAILABLE:
                p.partition()
        if self._swapper is not None:
            self._swapper.release_all()

    def _position(self, p: nn.Parameter) -> tuple[int, int, int]:
        """Return (sub-group, offset, values with padding) for this rank's shard of a parameter."""
        zero = self.engine.optimizer
        return zero.grad_position[zero.get_param_id(p)]

    def _num_own(self, name: str, p: nn.Parameter, part_numel: int) -> int:
        """Return how many values in this rank's shard belong to the parameter; the rest is padding."""
        start = p.ds_zero_partition_rank * part_numel  # type: ignore[attr-defined]
        return max(0, min(part_numel, self._tensors.local[name].numel() - start))


PARTITIONS: dict[int, Callable[[Wrapping], Partition]] = {
    0: ReplicatedPartition,
    1: FlatPartition,
    2: FlatPartition,
    3: ShardedPartition,
}
"""Partition class per ZeRO stage."""


def _reduce_when_complete(model: nn.Module) -> None:
    """Let DeepSpeed reduce a shared block's gradients once per backward pass.

    It does so after each layer's backward, with zeros for gradients that do not exist yet. A weight's gradient exists
    only after the last of them, as the sum over layers.
    """
    for block in model.modules():
        if isinstance(block, Block):
            for key, reduce in block._backward_hooks.items():
                block._backward_hooks[key] = partial(_reduce_if_complete, reduce)


def _reduce_if_complete(reduce: Callable[..., None], block: nn.Module, *gradients: Any) -> None:
    if any(p.grad is not None for p in block.parameters()):
        reduce(block, *gradients)

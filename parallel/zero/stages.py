"""Partitions of a model by ZeRO stage: full on every rank, in flat buffers over ranks, or each tensor sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn

from longctx.checkpoint_format import ROLES
from longctx.model.block import Block
from longctx.model.decoder import external_parameters
from longctx.model.experts.experts import is_expert_weight
from longctx.model.mtp import MtpJoin
from parallel.comm.communicator import Communicator
from parallel.comm.groups import ProcessGroup
from parallel.zero.gradients import Accept, named_gradients
from parallel.zero.optimizer import MASTER, MOMENTS, fill_moments, masters_of
from parallel.zero.partition import WORKING, Extent, Partition, Wrapping
from parallel.zero.swapping import WeightSwapper


class Whole(Partition):
    """Stage 0: every rank holds full weights, masters, moments and gradients; a weight is its own master."""

    is_whole = True

    def __init__(self, wrapping: Wrapping) -> None:
        self._clip_norm, clip_norm = 0.0, wrapping.options.clip_norm
        # DeepSpeed would clip by the mean of norms that each leave out the other ranks' experts: we clip instead.
        if wrapping.tensors.experts is not None:
            self._clip_norm, clip_norm = clip_norm, 0.0
        super().__init__(wrapping, clip_norm)

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.engine.optimizer

    def update(self, accept: Accept) -> tuple[float, bool]:
        """Check the norm first: DeepSpeed would update even by a gradient that is not finite."""
        # The same norm on every rank, from averaged gradients: all of them update, or none does.
        norm = self._gradient_norm()
        taken = math.isfinite(norm) and accept(norm)
        if taken:
            self._clip_gradients(norm)
            self.engine.step()
        else:
            # DeepSpeed counts the step's micro-batches and clears their gradients; its optimiser does nothing.
            self.engine.optimizer.step, update = _nothing, self.engine.optimizer.step
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

    def flats(self) -> Iterator[tuple[Tensor, Sequence[tuple[str, nn.Parameter]]]]:
        for name, p in self._model.network.named_parameters():
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

    def alike(self, name: str, p: nn.Parameter) -> dict[str, Tensor]:
        if self._tensors.replicas(name) is None:
            return {}
        found = {MASTER: p.detach()}
        # Before the first step there are no moments.
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
        # Every rank has the same gradients of the shared weights; those of the experts are only of its own experts.
        of_experts = [gradient for name, gradient in gradients.items() if is_expert_weight(name)]
        of_others = [gradient for name, gradient in gradients.items() if not is_expert_weight(name)]
        norms = [torch.nn.utils.get_total_norm(part) for part in (of_others, of_experts)]
        squares = torch.stack([norm.double() ** 2 for norm in norms])
        assert experts.ep_group is not None
        Communicator().all_reduce(squares[1], experts.ep_group, doing="adding up gradient norms of experts")
        return float(squares.sum().sqrt())

    def _clip_gradients(self, norm: float) -> None:
        """Scale gradients of this norm down to ``clip_norm``; if experts are not spread, DeepSpeed does it."""
        if self._clip_norm <= 0 or norm + 1e-6 <= self._clip_norm:
            return
        factor = self._clip_norm / (norm + 1e-6)
        for p in self._model.parameters():
            if p.grad is not None:
                p.grad.mul_(factor)


def _nothing() -> None:
    """Replace the update of a step that is skipped."""


class Flat(Partition):
    """Stages 1 and 2: every rank holds full weights, and a range of each flat buffer of masters and moments.

    In stage 2 gradients are in flat buffers spread over ranks, too.
    """

    def __init__(self, wrapping: Wrapping) -> None:
        super().__init__(wrapping, wrapping.options.clip_norm)
        # In stage 1 and bfloat16 DeepSpeed uses a different optimiser class, which keeps full gradients.
        self._keeps_whole_gradients = wrapping.stage == 1 and wrapping.dtype == torch.bfloat16 and not self._offloads

    def local_gradients(self) -> Iterator[tuple[str, Tensor]]:
        # Both by group of parameters, in the order in which the group lists them.
        zero = self.engine.optimizer
        if self._offloads:
            # They are on their way to CPU memory.
            zero._wait_for_offload_copies()
            groups, gradients = zero.params_in_partition, zero.offload_gradient_dict
        elif self._keeps_whole_gradients:
            groups, gradients = zero.bf16_groups, zero.fp32_groups_gradients
        else:
            groups, gradients = zero.params_in_partition, zero.averaged_gradients
        return named_gradients(self._model.network, groups, gradients)

    def flats(self) -> Iterator[tuple[Tensor, Sequence[tuple[str, nn.Parameter]]]]:
        names = {id(p): name for name, p in self._model.network.named_parameters()}
        zero = self.engine.optimizer
        groups = zero.bf16_groups if hasattr(zero, "bf16_groups") else zero.bit16_groups
        for flat, group in zip(masters_of(self.inner), groups, strict=True):
            yield flat, [(names[id(p)], p) for p in group]

    def extent(self, name: str, p: nn.Parameter) -> Extent:
        fragment = p._hp_mapping  # type: ignore[attr-defined]
        if fragment is None:  # all of it is in the ranges of other ranks
            return Extent(0, 0)
        address = fragment.lp_fragment_address
        return Extent(address.start, address.numel)

    @contextmanager
    def resident(self, group: int, *, moments: bool, writes: bool = False) -> Iterator[None]:
        with super().resident(group, moments=moments):
            if moments:
                # DeepSpeed links each parameter to its ranges of the moments once; these are new.
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

    def alike(self, name: str, p: nn.Parameter) -> dict[str, Tensor]:
        if self._tensors.replicas(name) is None:
            return {}
        return {WORKING: p.detach()}

    def refresh_weights(self) -> None:
        # Each rank rounds its own masters; one all-gather of each flat buffer brings those of the others.
        self.engine.optimizer.update_lp_params()


class Sharded(Partition):
    """Stage 3: every rank holds a part of each weight, with its master, moments and gradient.

    Each parameter is cut into equal parts, one per rank; the last ones are padded.
    """

    def __init__(self, wrapping: Wrapping) -> None:
        # Weights that another module's forward reads, such as a tied head: DeepSpeed has to gather them there too.
        for module, parameter in external_parameters(wrapping.model.network):
            deepspeed.zero.register_external_parameter(module, parameter)
        # A compiled graph spans modules, and no hook runs inside of it; and with chunks weights would be gathered once
        # for each. So all weights of a block are gathered before it runs.
        execution = wrapping.model.network.execution
        if execution.compiler is not None or execution.chunk_tokens:
            leaves: list[type[nn.Module]] = [Block]
            if wrapping.model.network.config.mtp_layers:
                leaves.append(MtpJoin)
            set_z3_leaf_modules(wrapping.model, leaves)
        super().__init__(wrapping, wrapping.options.clip_norm)

    def update(self, accept: Accept) -> tuple[float, bool]:
        # DeepSpeed expects a weight that it finds in memory to stay there, even one that it has read ahead.
        if self._swapper is not None:
            self._swapper.release_all()
        return super().update(accept)

    def local_gradients(self) -> Iterator[tuple[str, Tensor]]:
        zero = self.engine.optimizer
        if not self._offloads:
            yield from named_gradients(self._model.network, zero.fp16_groups, zero.averaged_gradients)
            return
        # The gradients that it hands on, to AdamW's copy or to a disk, are here, too.
        start = 0
        for group in self.groups():
            for name, p in group:
                count = p.partition_numel()  # type: ignore[attr-defined]
                yield name, zero.grad_partitions_flat_buffer.narrow(0, start, count)
                start += count

    def extent(self, name: str, p: nn.Parameter) -> Extent:
        _, _, count = self._position(p)
        # Equal parts by rank: the range of the last ones may be beyond the parameter's end, as padding.
        start = p.ds_zero_partition_rank * count  # type: ignore[attr-defined]
        return Extent(start, self._num_own(name, p, count))

    def flats(self) -> Iterator[tuple[Tensor, Sequence[tuple[str, nn.Parameter]]]]:
        yield from zip(self.engine.optimizer.fp32_partitioned_groups_flat, self.groups(), strict=True)

    def groups(self) -> list[list[tuple[str, nn.Parameter]]]:
        # DeepSpeed's sub-groups: each is updated at once, and read from a disk at once.
        names = {id(p): name for name, p in self._model.network.named_parameters()}
        return [[(names[id(p)], p) for p in group] for group in self.engine.optimizer.fp16_groups]

    @contextmanager
    def resident(self, group: int, *, moments: bool, writes: bool = False) -> Iterator[None]:
        zero = self.engine.optimizer
        # The optimiser is given one flat group at a time during a step: between steps it has none of them.
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
            # Also after an error; no effect if it was written.
            if is_swapped:
                zero._release_swap_buffers(group)

    def part(self, name: str, p: nn.Parameter, roles: Sequence[str] = ROLES) -> dict[str, Tensor]:
        # The originals: DeepSpeed's own functions would return copies on the GPU of offloaded tensors.
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

    def refresh_weights(self) -> None:
        # Copies within a node are gathered again when they are needed.
        self.engine.optimizer.invalidate_secondary_tensor()

    @property
    def _swapper(self) -> WeightSwapper | None:
        """Swapper that reads and writes weights on a disk; None if none are there."""
        return next(self._model.parameters()).nvme_swapper  # type: ignore[attr-defined]

    def _forget_weights(self, group: int) -> None:
        """Free gathered and prefetched tensors of a sub-group's old weights."""
        for p in self.engine.optimizer.fp16_groups[group]:
            if p.ds_status == ZeroParamStatus.AVAILABLE:
                p.partition()
        if self._swapper is not None:
            self._swapper.release_all()

    def _position(self, p: nn.Parameter) -> tuple[int, int, int]:
        """Return (sub-group, first value in it, values with padding) of this rank's part of a parameter."""
        zero = self.engine.optimizer
        return zero.grad_position[zero.get_param_id(p)]

    def _num_own(self, name: str, p: nn.Parameter, part_numel: int) -> int:
        """Return the number of values of this rank's part that belong to the parameter; the rest is padding."""
        start = p.ds_zero_partition_rank * part_numel  # type: ignore[attr-defined]
        return max(0, min(part_numel, self._tensors.local[name].numel() - start))


PARTITIONS: dict[int, Callable[[Wrapping], Partition]] = {0: Whole, 1: Flat, 2: Flat, 3: Sharded}
"""How each stage holds the model."""

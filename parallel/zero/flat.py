"""Stages 1 and 2: masters and moments lie in flat buffers spread over ranks; in stage 2 gradients do too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from longctx.checkpoint_format import ROLES
from parallel.comm.groups import ProcessGroup
from parallel.zero.gradients import named_gradients
from parallel.zero.partition import MASTER, WORKING, Extent, Wrapping, fill_moments, masters_of, update_by_deepspeed
from parallel.zero.refusal import Accept


class Flat:
    """Every rank holds whole weights, and a range of each flat buffer of masters and moments."""

    def __init__(self, wrapping: Wrapping) -> None:
        self._model, self._tensors = wrapping.model, wrapping.tensors
        self.engine = wrapping.start(clip_norm=wrapping.options.clip_norm)
        # In stage 1 and bfloat16 DeepSpeed takes an optimiser class of its own, which keeps whole gradients.
        self._offloads = wrapping.zero.offload != "none"
        self._keeps_whole_gradients = wrapping.stage == 1 and wrapping.dtype == torch.bfloat16 and not self._offloads

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.engine.optimizer.optimizer

    def update(self, accept: Accept) -> tuple[float, bool]:
        return update_by_deepspeed(self.engine, accept)

    def local_gradients(self) -> Iterator[tuple[str, Tensor]]:
        # Both by group of parameters, in the order in which the group lists them.
        zero = self.engine.optimizer
        if self._offloads:
            # They are on their way to the machine's memory.
            zero._wait_for_offload_copies()
            groups, gradients = zero.params_in_partition, zero.offload_gradient_dict
        elif self._keeps_whole_gradients:
            groups, gradients = zero.bf16_groups, zero.fp32_groups_gradients
        else:
            groups, gradients = zero.params_in_partition, zero.averaged_gradients
        return named_gradients(self._model.network, groups, gradients)

    def extent(self, name: str, p: nn.Parameter) -> Extent:
        fragment = p._hp_mapping  # type: ignore[attr-defined]
        if fragment is None:  # all of it lies in the ranges of other ranks
            return Extent(0, 0)
        address = fragment.lp_fragment_address
        return Extent(address.start, address.numel)

    def groups(self) -> list[list[tuple[str, nn.Parameter]]]:
        return [list(self._model.network.named_parameters())]

    @contextmanager
    def resident(self, group: int, *, moments: bool, writes: bool = False) -> Iterator[None]:
        if moments:
            fill_moments(self.inner, masters_of(self.inner))
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

    def replicas(self, name: str) -> ProcessGroup | None:
        return None

    def answers_for(self, index: int, name: str) -> bool:
        return True

    def alike(self, name: str, p: nn.Parameter) -> dict[str, Tensor]:
        if self._tensors.replicas(name) is None:
            return {}
        return {WORKING: p.detach()}

    def working_part(self, name: str, p: nn.Parameter) -> Tensor:
        return p.detach()

    def refresh_weights(self) -> None:
        # Each rank rounds its own masters; one all-gather of each flat buffer brings those of the others.
        self.engine.optimizer.update_lp_params()

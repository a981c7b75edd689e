"""Stage 0: every rank holds whole weights, masters, moments and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from longctx.checkpoint_format import ROLES
from longctx.model.experts.experts import is_expert_weight
from parallel.comm.communicator import Communicator
from parallel.comm.groups import ProcessGroup
from parallel.zero.partition import MASTER, MOMENTS, Extent, Wrapping, fill_moments, masters_of
from parallel.zero.refusal import Accept


class Whole:
    """Nothing is partitioned; a weight is its own master."""

    def __init__(self, wrapping: Wrapping) -> None:
        self._model, self._tensors = wrapping.model, wrapping.tensors
        if wrapping.tensors.experts is None:
            self._clip_norm = 0.0
            self.engine = wrapping.start(clip_norm=wrapping.options.clip_norm)
        else:
            # DeepSpeed would clip by the mean of norms that each leave out the other ranks' experts: we clip instead.
            self._clip_norm = wrapping.options.clip_norm
            self.engine = wrapping.start(clip_norm=0.0)

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.engine.optimizer

    def update(self, accept: Accept) -> tuple[float, bool]:
        """Look at the norm first: DeepSpeed would update also by a gradient that is not finite."""
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

    def groups(self) -> list[list[tuple[str, nn.Parameter]]]:
        return [list(self._model.network.named_parameters())]

    @contextmanager
    def resident(self, group: int, *, moments: bool, writes: bool = False) -> Iterator[None]:
        if moments:
            fill_moments(self.inner, masters_of(self.inner))
        yield

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

    def working_part(self, name: str, p: nn.Parameter) -> Tensor:
        return p.detach()

    def refresh_weights(self) -> None:
        """Nothing to do: forward reads the masters."""

    def _gradient_norm(self) -> float:
        """DeepSpeed reports no norm here. Gradients are whole, and averaged on every rank that holds the weight."""
        gradients = {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}
        experts = self._tensors.experts
        if experts is None:
            return float(torch.nn.utils.get_total_norm(gradients.values()))
        # Every rank has the same gradients of the shared weights; those of the experts are of its own experts alone.
        of_experts = [gradient for name, gradient in gradients.items() if is_expert_weight(name)]
        of_others = [gradient for name, gradient in gradients.items() if not is_expert_weight(name)]
        norms = [torch.nn.utils.get_total_norm(part) for part in (of_others, of_experts)]
        squares = torch.stack([norm.double() ** 2 for norm in norms])
        assert experts.ep_group is not None
        Communicator().all_reduce(squares[1], experts.ep_group, doing="adding up gradient norms of experts")
        return float(squares.sum().sqrt())

    def _clip_gradients(self, norm: float) -> None:
        """Scale gradients of this norm down to ``clip_norm``; where experts are not spread, DeepSpeed does it."""
        if self._clip_norm <= 0 or norm + 1e-6 <= self._clip_norm:
            return
        factor = self._clip_norm / (norm + 1e-6)
        for p in self._model.parameters():
            if p.grad is not None:
                p.grad.mul_(factor)


def _nothing() -> None:
    """The update of a step that is left out."""

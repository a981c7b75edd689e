"""The one door to DeepSpeed: ZeRO stages 0–3 around our module, and its state as ranges of named tensors.

DeepSpeed is given no mpu, no mesh and no sequence-parallel size: it averages gradients over all ranks, and the loss is
scaled once by their number. Every other set-up of this version is wrong in some stage (see
docs/decisions/2026-11-deepspeed-grouping.md). Where ranks share out the experts it is told so by marks on
their weights and by a module of a class that it looks for (docs/decisions/2026-11-expert-parallel.md).
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from typing import Any, NamedTuple

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # parallel/runtime/device.py may have said otherwise

import deepspeed
import deepspeed.comm.torch
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state
from torch import Tensor, nn

from longctx.checkpoint_format import ROLES
from longctx.errors import GradientError
from longctx.model.experts.experts import is_expert_weight
from longctx.objectives.causal_lm import CausalLM
from parallel.zero.experts import share_out_experts
from parallel.zero.options import OptimizerOptions, check_zero, deepspeed_config, optimizer_groups, quiet_deepspeed

MOMENTS = ROLES[1:]

ReadRange = Callable[[str, str, int, int], Tensor]
"""(tensor name, role, start, count) -> flat fp32 values."""


class OwnedRange(NamedTuple):
    """Values of one tensor in one role that this rank answers for."""

    name: str
    role: str
    start: int
    values: Tensor


class ZeroEngine:
    """A ``CausalLM`` under ZeRO: micro-batches in, one optimiser step out, whatever the stage."""

    def __init__(
        self, model: CausalLM, *, stage: int, dtype: torch.dtype, accumulation: int, options: OptimizerOptions
    ) -> None:
        """Hand the module to DeepSpeed. ``accumulation`` micro-batches make a step.

        Which experts are here is what the decoder's dispatcher says.
        """
        check_zero(stage, dtype)
        quiet_deepspeed()
        self.stage, self.dtype, self._options = stage, dtype, options
        self._own_shapes = {name: p.shape for name, p in model.decoder.named_parameters()}
        self._shapes = {n: torch.Size(model.decoder.logical_shape(n, s)) for n, s in self._own_shapes.items()}
        self._buffers = {name: b.shape for name, b in model.decoder.named_buffers()}
        if stage == 3:
            for module, parameter in model.decoder.external_parameters():
                deepspeed.zero.register_external_parameter(module, parameter)
        self._experts = share_out_experts(model)
        optimizer = torch.optim.AdamW(
            optimizer_groups(model, options.weight_decay), lr=0.0, betas=options.betas, eps=options.eps, foreach=False
        )
        clip_norm = 0.0 if self._clips_itself else options.clip_norm
        with redirect_stdout(io.StringIO()):  # memory figures that no option silences
            # Any: DeepSpeed's types name a dozen optimisers, and none of the attributes we lean on.
            self._engine: Any = deepspeed.initialize(
                model=model, optimizer=optimizer, config=deepspeed_config(stage, dtype, accumulation, clip_norm)
            )[0]

    @property
    def model(self) -> CausalLM:
        """The wrapped module, for evaluation without gradients."""
        return self._engine.module

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, each counted once."""
        return sum(shape.numel() for shape in self._shapes.values())

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every parameter and buffer of the whole model, by name."""
        return {**self._shapes, **self._buffers}

    def forward(self, batch) -> Any:
        """The module's forward on this rank's share of a micro-batch."""
        return self._engine(batch)

    def backward(self, loss_share: Tensor) -> None:
        """Gradients of this rank's additive share of the step's loss; between micro-batches they add up."""
        self._engine.backward(loss_share * dist.get_world_size(), scale_wrt_gas=False)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # counts the micro-batch; updates nothing

    def step(self, lr: float) -> float:
        """Clip, update with this learning rate, clear the gradients; returns the gradient norm before clipping.

        GradientError on every rank alike when that norm is not finite. Weights and moments are then as before, in every
        stage: stage 0 would update all the same, so its norm is looked at first; stages 1 to 3 leave the update out,
        in silence, on all ranks as soon as one rank's part is not finite (``optimizer.overflow``; stage 2 does so in
        bfloat16 because ``check_grad_overflow`` is set). No further step may follow.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        broken = self._broken_gradients()  # before the step, which lets go of them; a small tensor that stays here
        if self.stage == 0:
            norm = self._plain_gradient_norm()
            self._check_gradients(norm, broken)
            if self._clips_itself:
                self._scale_plain_gradients(min(1.0, self._options.clip_norm / (norm + 1e-6)))
            self._engine.step()
            return norm
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        self._check_gradients(math.inf if self._engine.optimizer.overflow else norm, broken)
        return norm

    def _check_gradients(self, norm: float, broken: Tensor) -> None:
        if not math.isfinite(norm):
            raise GradientError(norm, self._named_on_any_rank(broken))

    def broken_weights(self) -> list[str]:
        """Names of the parameters and buffers that hold a value that is not finite. Collective."""
        tensors = dict(self.model.decoder.named_buffers())
        for name, p in self.model.decoder.named_parameters():
            tensors[name] = p.detach()
            if self.stage == 3:
                part, rank = p.ds_tensor, p.ds_zero_partition_rank  # type: ignore[attr-defined]
                own = self._own_shapes[name].numel() - rank * part.numel()
                tensors[name] = part[: max(0, own)]  # the last parts are padded with anything
        return self._named_on_any_rank(_not_finite([tensors[name] for name in self.shapes]))

    def _broken_gradients(self) -> Tensor:
        """Which of the tensors in ``shapes`` have a gradient that is not finite in this rank's part; on its device."""
        parts, nothing = dict(self._local_gradients()), torch.zeros(0, device=self._engine.device)
        return _not_finite([parts.get(name, nothing) for name in self.shapes])

    def _local_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of the step's gradient, by name, as DeepSpeed holds it between backward and step."""
        if self.stage == 0:
            yield from ((name, p.grad) for name, p in self.model.decoder.named_parameters() if p.grad is not None)
            return
        names = {id(p): name for name, p in self.model.decoder.named_parameters()}
        zero = self._engine.optimizer
        if self.stage == 3:
            groups, gradients = zero.fp16_groups, zero.averaged_gradients
        elif self.stage == 1 and self.dtype == torch.bfloat16:  # a class of its own, which keeps whole gradients
            groups, gradients = zero.bf16_groups, zero.fp32_groups_gradients
        else:
            groups, gradients = zero.params_in_partition, zero.averaged_gradients
        for number, parameters in enumerate(groups):
            parts = [g for g in gradients[number] if not getattr(g, "_zero_padding", False)]
            yield from ((names[id(p)], part) for p, part in zip(parameters, parts, strict=False))

    def _named_on_any_rank(self, found: Tensor) -> list[str]:
        """Names of the tensors in ``shapes`` that are marked on one rank or more. Collective."""
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return [name for name, one in zip(self.shapes, found.tolist(), strict=True) if one]

    def _plain_gradient_norm(self) -> float:
        """Stage 0 reports no norm; its gradients are whole and already averaged on every rank that holds the weight."""
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        if self._experts is None:
            return float(torch.nn.utils.get_total_norm(grads.values()))
        parts = [[g for n, g in grads.items() if is_expert_weight(n) == of_experts] for of_experts in (False, True)]
        squares = torch.stack([torch.nn.utils.get_total_norm(part).double() ** 2 for part in parts])
        dist.all_reduce(squares[1], group=self._experts.ep_group)
        return float(squares.sum().sqrt())

    @property
    def _clips_itself(self) -> bool:
        """DeepSpeed's stage 0 would clip by the mean of norms that each leave out the other ranks' experts."""
        return self.stage == 0 and self._experts is not None and self._options.clip_norm > 0

    def _scale_plain_gradients(self, factor: float) -> None:
        for p in self.model.parameters():
            if p.grad is not None and factor < 1:
                p.grad.mul_(factor)

    def owned_ranges(self) -> Iterator[OwnedRange]:
        """Master weights, moments and buffers as fp32 ranges of the whole model's tensors.

        Over all ranks every value exactly once.
        """
        self._prime_moments()
        for index, (name, buffer) in enumerate(self.model.decoder.named_buffers()):
            if self._answers_for(index, name):
                yield OwnedRange(name, ROLES[0], 0, buffer.detach().float().flatten().cpu())
        for index, (name, p) in enumerate(self.model.decoder.named_parameters()):
            if self.stage == 0:
                if not self._answers_for(index, name):
                    continue
                state = self._engine.optimizer.state[p]
                start, numel, parts = 0, p.numel(), (p.view(-1), *(state[m].view(-1) for m in MOMENTS))
            else:
                start, numel, parts = self._partition(name, p)
            if numel:
                for role, values in zip(ROLES, parts, strict=True):
                    yield OwnedRange(name, role, self._first_value(name) + start, values.detach()[:numel].cpu())

    def _answers_for(self, index: int, name: str) -> bool:
        """Whether this rank is the one, of those that hold the same values, that gives the ``index``-th tensor."""
        degree = self._experts.ep_size if self._experts is not None and is_expert_weight(name) else 1
        return index % (dist.get_world_size() // degree) == dist.get_rank() // degree

    def _first_value(self, name: str) -> int:
        """Where this rank's part of a flattened tensor of the whole model starts."""
        if self._experts is None or not is_expert_weight(name):
            return 0
        return self._experts.ep_rank * self._own_shapes[name].numel()

    def load(self, read: ReadRange, *, step: int, moments: bool = True) -> None:
        """Set weights, masters, moments and buffers from ``read``, as after ``step`` optimiser steps.

        Collective in stage 3. Without ``moments`` the optimiser starts afresh.
        """
        self._prime_moments()
        for name, buffer in self.model.decoder.named_buffers():
            buffer.copy_(read(name, ROLES[0], 0, buffer.numel()).view_as(buffer))
        for name, p in self.model.decoder.named_parameters():
            roles = ROLES if moments else ROLES[:1]
            if self.stage == 0:
                state = self._engine.optimizer.state[p]
                start, numel, targets = 0, p.numel(), (p.data.view(-1), *(state[m].view(-1) for m in MOMENTS))
            else:
                start, numel, targets = self._partition(name, p)
            for role, target in zip(roles, targets, strict=False):
                if numel:
                    target.data[:numel].copy_(read(name, role, self._first_value(name) + start, numel))
            if self.stage:
                self._set_working_weight(name, p, read)
        for state in self._inner.state.values():
            if "step" in state:
                state["step"] = torch.tensor(float(step if moments else 0))  # one each: a shared one counts many times

    @property
    def _inner(self) -> torch.optim.Optimizer:
        """The AdamW inside whatever wraps it."""
        optimizer = self._engine.optimizer
        return optimizer if self.stage == 0 else optimizer.optimizer

    def _partition(self, name: str, p: nn.Parameter) -> tuple[int, int, tuple[Tensor, ...]]:
        """(start, count, flat tensors by role) of what this rank owns in stage 1, 2 or 3 of a parameter it holds."""
        if self.stage == 3:
            parts = (safe_get_local_fp32_param(p), *(safe_get_local_optimizer_state(p, m) for m in MOMENTS))
            start = p.ds_zero_partition_rank * parts[0].numel()  # type: ignore[attr-defined]
            # equal shares, the last ones padded
            return start, max(0, min(parts[0].numel(), self._own_shapes[name].numel() - start)), parts
        fragment = p._hp_mapping  # type: ignore[attr-defined]
        if fragment is None:
            return 0, 0, ()
        address = fragment.lp_fragment_address
        return address.start, address.numel, tuple(fragment.get_hp_fragment(m) for m in (None, *MOMENTS))

    def _set_working_weight(self, name: str, p: nn.Parameter, read: ReadRange) -> None:
        """The weights that forward uses follow their masters; DeepSpeed would only do so after its next step."""
        shape, first = self._own_shapes[name], self._first_value(name)
        if self.stage < 3:
            p.data.copy_(read(name, ROLES[0], first, shape.numel()).view(shape))
            return
        with deepspeed.zero.GatheredParameters([p], modifier_rank=0):  # the first of those that partition it
            if p.ds_zero_partition_rank == 0:  # type: ignore[attr-defined]
                p.data.copy_(read(name, ROLES[0], first, shape.numel()).view(shape))

    def _prime_moments(self) -> None:
        """Give every flat partition its moments: DeepSpeed and AdamW create them at the first step only."""
        zero, inner = self._engine.optimizer, self._inner
        flat = [p for group in inner.param_groups for p in group["params"]]
        flat += list(getattr(zero, "fp32_partitioned_groups_flat", []))
        for p in flat:
            if p.numel() and not inner.state[p]:
                moments = {moment: torch.zeros_like(p) for moment in MOMENTS}
                inner.state[p].update(step=torch.tensor(0.0), **moments)
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()


def _not_finite(tensors: Iterable[Tensor]) -> Tensor:
    """1 for each tensor that holds a value that is not finite, else 0. No host sync."""
    filled = [x.detach() if x.numel() else x.new_zeros(1) for x in tensors]
    largest = torch._foreach_norm(filled, torch.inf, dtype=torch.float32)  # exact, and without a mask of each
    return (~torch.stack(largest).isfinite()).to(torch.int32)

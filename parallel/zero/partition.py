"""Partition of a model by a ZeRO stage, and DeepSpeed's start: the base of ``Whole``, ``Flat`` and ``Sharded``."""

from __future__ import annotations

import gc
import io
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, NamedTuple

import deepspeed
import torch
from torch import Tensor, nn

from longctx.checkpoint_format import ROLES
from longctx.objectives.task import Task
from parallel.comm.groups import ProcessGroup, groups_of_library
from parallel.zero.allocate import allocate, nothing_is_sent
from parallel.zero.cpu_adam import build_cpu_adam
from parallel.zero.deepspeed_config import accelerator, deepspeed_config
from parallel.zero.gradients import Accept, record_queued_gradients, refusing
from parallel.zero.muon import FlatMatrices, Held, Matrices, Muon
from parallel.zero.optimizer import MASTER, AdamW, OptimizerOptions, fill_moments, masters_of, optimizer_groups
from parallel.zero.options import ZeroOptions, uses_fused_adamw
from parallel.zero.swapping import SwapSpace, WeightSwapper, swap_space
from parallel.zero.tensors import ModelTensors

WORKING = "weight of forward"
"""The role of what forward reads, where it is not the master."""


class Extent(NamedTuple):
    """Flat range of a parameter whose master and moments this rank holds."""

    start: int
    """In the parameter as this rank held it before ZeRO."""
    numel: int
    """0 where the rank holds nothing of it."""


@dataclass(frozen=True, kw_only=True)
class Wrapping:
    """Model and settings that DeepSpeed is started with."""

    model: Task
    tensors: ModelTensors
    stage: int
    dtype: torch.dtype
    accumulation: int
    """Micro-batches that make a step."""
    options: OptimizerOptions
    zero: ZeroOptions
    matrices: Mapping[str, Matrices]
    """Of the parameters that Muon updates; none with AdamW."""

    def start(self, *, clip_norm: float) -> Any:
        """Hand the module to DeepSpeed and return its engine. It clips by ``clip_norm``; 0 never."""
        with swap_space(self.zero) as space:
            return self._start(clip_norm, space)

    def _start(self, clip_norm: float, space: SwapSpace | None) -> Any:
        """Run ``start`` with the disk that DeepSpeed may swap to."""
        swap_path, swapper = "", None
        if space is not None:
            swap_path = space.path
            swapper = WeightSwapper(space, self.dtype, persistence_threshold=self.zero.param_persistence_threshold)
        config = deepspeed_config(self.stage, self.dtype, self.accumulation, clip_norm, self.zero, swap_path=swap_path)
        # Groups first: they depend on the number of axes, which a partitioned parameter has lost.
        groups = optimizer_groups(self.model, self.options.weight_decay, self.matrices)
        with groups_of_library():
            allocate(
                self.model,
                stage=self.stage,
                dtype=self.dtype,
                config=config,
                experts=self.tensors.experts,
                swapper=swapper,
            )
        optimizer = self._optimizer(groups)
        # DeepSpeed prints memory figures that no option silences. Before each it collects garbage, 15 times in all: the
        # imports have made a million objects, and none of them is garbage.
        gc.freeze()
        try:
            with redirect_stdout(io.StringIO()), groups_of_library(), nothing_is_sent():
                # Any: DeepSpeed's types name a dozen optimisers, and none of the attributes that we use.
                engine: Any = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)[0]
        finally:
            gc.unfreeze()
        record_queued_gradients(engine.optimizer)
        return engine

    def _optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the optimiser that DeepSpeed wraps."""
        common: dict[str, Any] = {"lr": 0.0, "betas": self.options.betas, "eps": self.options.eps}
        if self.zero.offload != "none":
            assert self.options.name == "adamw", "what is offloaded is DeepSpeed's AdamW's"
            return build_cpu_adam(groups, **common)
        # Otherwise one parameter at a time: the foreach form would hold temporaries of all of them at once.
        common |= {"foreach": False, "fused": uses_fused_adamw(accelerator(), self.options.fused)}
        if self.options.name == "muon":
            return Muon(groups, momentum=self.options.momentum, **common)
        return AdamW(groups, **common)


class Partition(ABC):
    """Wrapped model as one kind of stage holds it. Defaults here hold unless a stage overrides them."""

    def __init__(self, wrapping: Wrapping, clip_norm: float) -> None:
        """Start DeepSpeed, which clips by ``clip_norm``; 0 never."""
        self._model, self._tensors = wrapping.model, wrapping.tensors
        self._offloads = wrapping.zero.offload != "none"
        self._matrices = wrapping.matrices
        self.engine: Any = wrapping.start(clip_norm=clip_norm)
        if isinstance(self.inner, Muon):
            self.inner.flats = dict(self._flat_matrices(self.inner))

    @property
    def inner(self) -> torch.optim.Optimizer:
        """AdamW inside the optimisers that wrap it."""
        return self.engine.optimizer.optimizer

    def update(self, accept: Accept) -> tuple[float, bool]:
        """Clip the gradients, update masters and weights, clear the gradients.

        Return the norm before clipping, and whether there was an update: on no rank if the norm is not finite, or if
        ``accept`` refuses it. Gradients are cleared in any case. Collective.
        """
        # Stages 1 to 3 silently skip the update on all ranks as soon as one rank's part is not finite
        # (``optimizer.overflow``; stage 2 does so in bfloat16 because ``check_grad_overflow`` is set).
        with refusing(accept) as seen:
            self.engine.step()
        if not self.engine.optimizer.overflow:
            return float(self.engine.get_global_grad_norm()), True
        if seen.norm is None:
            return math.inf, False
        return seen.norm, False

    @abstractmethod
    def local_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of the step's gradient, by name, as DeepSpeed holds it between backward and step."""

    @abstractmethod
    def extent(self, name: str, p: nn.Parameter) -> Extent:
        """Return the range of a parameter of which this rank holds masters and moments."""

    def groups(self) -> list[list[tuple[str, nn.Parameter]]]:
        """Return parameters by name, all of them once: those of a group are in memory together."""
        return [list(self._model.network.named_parameters())]

    @contextmanager
    def resident(self, group: int, *, moments: bool, writes: bool = False) -> Iterator[None]:
        """Keep masters and moments of a group's parameters in memory within the block.

        With ``moments`` every master has its own: DeepSpeed and AdamW create them only at the first step. With
        ``writes`` the values written to masters and moments stay, and reach the weights that forward reads, as after a
        step, once ``refresh_weights`` was called.
        """
        if moments:
            fill_moments(self.inner, masters_of(self.inner))
        yield

    def roles(self, name: str) -> tuple[str, ...]:
        """Return the roles that the optimiser keeps of a parameter."""
        if name in self._matrices:
            return ROLES[:2]
        return ROLES

    @abstractmethod
    def flats(self) -> Iterator[tuple[Tensor, Sequence[tuple[str, nn.Parameter]]]]:
        """Yield each tensor that the optimiser updates, and the parameters, by name, that it has parts of.

        The order is the same on all ranks that hold the same weights, also if they hold no part of a parameter.
        """

    def _flat_matrices(self, inner: Muon) -> Iterator[tuple[int, FlatMatrices]]:
        """Yield the matrices in each tensor that Muon updates, by the tensor's identity."""
        for flat, parameters in self.flats():
            held = []
            for name, p in parameters:
                if name not in self._matrices:
                    break
                extent, at = self.extent(name, p), 0
                if extent.numel:
                    own = self.part(name, p, (MASTER,))[MASTER]
                    at = int(own.storage_offset()) - int(flat.storage_offset())
                held.append(Held(self._matrices[name], extent.start, extent.numel, at))
            else:
                first = parameters[0][0]
                group = None
                # Full on every rank, or spread over those that hold the same weights.
                if not self.is_whole:
                    group = self._tensors.replicas(first)
                yield id(flat), FlatMatrices(held, group, inner.matrix_dtype)

    is_whole: bool = False
    """Whether every rank has all values of every master that it has any of."""

    @abstractmethod
    def part(self, name: str, p: nn.Parameter, roles: Sequence[str] = ROLES) -> dict[str, Tensor]:
        """Return by role a flat tensor of this rank's part of a ``resident`` parameter.

        Only the first values count, as many as its extent has; padding may follow.
        """

    def replicas(self, name: str) -> ProcessGroup | None:
        """Return the ranks that all hold this rank's ``part`` of the parameter ``name``; None if no other rank does."""
        return None

    def answers_for(self, index: int, name: str) -> bool:
        """Return whether this rank is the one that provides its part of the ``index``-th parameter."""
        return True

    def alike(self, name: str, p: nn.Parameter) -> dict[str, Tensor]:
        """Return the tensors of a parameter that other ranks hold with the same bits, by role; full or none."""
        return {}

    def working_part(self, name: str, p: nn.Parameter) -> Tensor:
        """Return this rank's part of the weight that forward reads."""
        return p.detach()

    @abstractmethod
    def refresh_weights(self) -> None:
        """Make forward read the values written to masters. Collective."""

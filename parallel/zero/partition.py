"""Model partition per ZeRO stage, and DeepSpeed's startup: the base class for each stage's partition."""

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
from parallel.comm.process_groups import ProcessGroup, groups_of_library
from parallel.zero.allocate import allocate, disable_broadcast
from parallel.zero.cpu_adam import build_cpu_adam
from parallel.zero.deepspeed_config import accelerator, deepspeed_config
from parallel.zero.gradients import UpdateCheck, record_queued_gradients, refusing
from parallel.zero.model_tensors import ModelTensors
from parallel.zero.optimizer import MASTER, AdamW, OptimizerOptions, fill_moments, masters_of, optimizer_groups
from parallel.zero.swapping import SwapSpace, WeightSwapper, swap_space
from parallel.zero.zero_muon import FlatMatrices, Matrices, MatrixRange, Muon
from parallel.zero.zero_options import ZeroOptions, uses_fused_adamw

WORKING = "weight of forward"
"""Role for the weight that forward reads, if it is not the master."""


class Extent(NamedTuple):
    """Flat range in a parameter, with its master and moments on this rank."""

    start: int
    """In the parameter as this rank held it before ZeRO."""
    numel: int
    """0 if the rank holds no part."""


@dataclass(frozen=True, kw_only=True)
class Wrapping:
    """Model and settings with which DeepSpeed is started."""

    model: Task
    tensors: ModelTensors
    stage: int
    dtype: torch.dtype
    accumulation: int
    """Micro-batches per step."""
    options: OptimizerOptions
    zero: ZeroOptions
    matrices: Mapping[str, Matrices]
    """Matrices by name, for the parameters that Muon updates; empty with AdamW."""

    def start(self, *, clip_norm: float) -> Any:
        """Wrap the module with DeepSpeed and return its engine. ``clip_norm`` 0 disables clipping."""
        with swap_space(self.zero) as space:
            return self._start(clip_norm, space)

    def _start(self, clip_norm: float, space: SwapSpace | None) -> Any:
        """Run ``start`` with the disk space to which DeepSpeed may swap."""
        swap_path, swapper = "", None
        if space is not None:
            swap_path = space.path
            swapper = WeightSwapper(space, self.dtype, persistence_threshold=self.zero.param_persistence_threshold)
        config = deepspeed_config(self.stage, self.dtype, self.accumulation, clip_norm, self.zero, swap_path=swap_path)
        # Build groups first: they depend on the number of dims, which a partitioned parameter has lost.
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
        # DeepSpeed prints memory usage that no option silences, and collects garbage before each report, 15 times in
        # total. The imports have created a million live objects, so freeze them.
        gc.freeze()
        try:
            with redirect_stdout(io.StringIO()), groups_of_library(), disable_broadcast():
                # Any: DeepSpeed's types list a dozen optimizers, but not the attributes used here.
                engine: Any = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)[0]
        finally:
            gc.unfreeze()
        record_queued_gradients(engine.optimizer)
        return engine

    def _optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        common: dict[str, Any] = {"lr": 0.0, "betas": self.options.betas, "eps": self.options.eps}
        if self.zero.offload != "none":
            assert self.options.name == "adamw", "offload needs DeepSpeed's AdamW"
            return build_cpu_adam(groups, **common)
        # One parameter at a time: the foreach form would need temporaries for all of them at once.
        common |= {"foreach": False, "fused": uses_fused_adamw(accelerator(), self.options.fused)}
        if self.options.name == "muon":
            return Muon(groups, momentum=self.options.momentum, **common)
        return AdamW(groups, **common)


# ZeRO ranges. A stage decides which flat range of each parameter a rank owns (`extent`); master weights and moments
# exist only for owned ranges. Invariant: over all ranks that hold a parameter, the owned ranges cover each value
# exactly once. In stage 0 every rank holds the full range, and `answers_for` selects one rank per tensor. So
# checkpointing, loading and checksums need no code per stage. (ZeRO: Rajbhandari et al., arXiv 1910.02054.)
class Partition(ABC):
    """Wrapped model as partitioned by one kind of stage. Defaults apply unless a stage overrides them."""

    def __init__(self, wrapping: Wrapping, clip_norm: float) -> None:
        """Start DeepSpeed. ``clip_norm`` 0 disables clipping."""
        self._model, self._tensors = wrapping.model, wrapping.tensors
        self._offloads = wrapping.zero.offload != "none"
        self._matrices = wrapping.matrices
        self.engine: Any = wrapping.start(clip_norm=clip_norm)
        if isinstance(self.inner, Muon):
            self.inner.flat_buffers = dict(self._flat_matrices(self.inner))

    @property
    def inner(self) -> torch.optim.Optimizer:
        """AdamW inside the optimizers that wrap it."""
        return self.engine.optimizer.optimizer

    def update(self, should_update: UpdateCheck) -> tuple[float, bool]:
        """Clip the gradients, update masters and weights, and clear the gradients.

        Return the norm before clipping, and True if the update ran. It is skipped on all ranks if the norm is not
        finite, or if ``should_update`` rejects it. Gradients are cleared in either case. Collective.
        """
        # Stages 1 to 3 silently skip the update on all ranks as soon as one rank's partition is not finite
        # (``optimizer.overflow``; stage 2 does so in bfloat16 because ``check_grad_overflow`` is set).
        with refusing(should_update) as seen:
            self.engine.step()
        if not self.engine.optimizer.overflow:
            return float(self.engine.get_global_grad_norm()), True
        if seen.norm is None:
            return math.inf, False
        return seen.norm, False

    @abstractmethod
    def local_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of the step's gradient, by name, as held by DeepSpeed between backward and step."""

    @abstractmethod
    def extent(self, name: str, p: nn.Parameter) -> Extent:
        """Return the parameter's range for which this rank holds masters and moments."""

    def groups(self) -> list[list[tuple[str, nn.Parameter]]]:
        """Return all trained parameters by name, each in one group; a group's parameters are in memory together."""
        return [[(name, p) for name, p in self._model.network.named_parameters() if p.requires_grad]]

    def frozen(self) -> list[tuple[str, nn.Parameter]]:
        """Return the frozen parameters by name: only the weights that forward reads, without masters and moments."""
        return [(name, p) for name, p in self._model.network.named_parameters() if not p.requires_grad]

    @contextmanager
    def in_memory(self, group: int, *, moments: bool, writes: bool = False) -> Iterator[None]:
        """Keep masters and moments for a group's parameters in memory within the ``with`` block.

        With ``moments``, create missing moments: DeepSpeed and AdamW do so only at the first step. With ``writes``,
        values written to masters and moments persist and, after ``refresh_weights``, reach the weights that forward
        reads, as after a step.
        """
        if moments:
            fill_moments(self.inner, masters_of(self.inner))
        yield

    def roles(self, name: str) -> tuple[str, ...]:
        """Return the parameter's roles in the optimizer state."""
        if name in self._matrices:
            return ROLES[:2]
        return ROLES

    @abstractmethod
    def flat_buffers(self) -> Iterator[tuple[Tensor, Sequence[tuple[str, nn.Parameter]]]]:
        """Yield each tensor that the optimizer updates, with the parameters, by name, that it contains.

        The order is equal on all ranks that hold the same weights, even if they hold no part of a parameter.
        """

    def _flat_matrices(self, inner: Muon) -> Iterator[tuple[int, FlatMatrices]]:
        """Yield the matrices in each tensor that Muon updates, by the tensor's id."""
        for flat, parameters in self.flat_buffers():
            held = []
            for name, p in parameters:
                if name not in self._matrices:
                    break
                extent, at = self.extent(name, p), 0
                if extent.numel:
                    own = self.part(name, p, (MASTER,))[MASTER]
                    at = int(own.storage_offset()) - int(flat.storage_offset())
                held.append(MatrixRange(self._matrices[name], extent.start, extent.numel, at))
            else:
                first = parameters[0][0]
                group = None
                # Full on every rank, or partitioned over the ranks that hold the same weights.
                if not self.is_whole:
                    group = self._tensors.replicas(first)
                yield id(flat), FlatMatrices(held, group, inner.matrix_dtype)

    is_whole: bool = False
    """True if every rank has all values of each master that it holds."""

    @abstractmethod
    def part(self, name: str, p: nn.Parameter, roles: Sequence[str] = ROLES) -> dict[str, Tensor]:
        """Return, by role, a flat tensor with this rank's part of a ``in_memory`` parameter.

        Only the first ``extent.numel`` values count; padding may follow.
        """

    def replicas(self, name: str) -> ProcessGroup | None:
        """Return the ranks that all hold this rank's ``part`` of the parameter ``name``; None if no other rank does."""
        return None

    def answers_for(self, index: int, name: str) -> bool:
        """Return True if this rank provides its part of the ``index``-th parameter."""
        return True

    def replicated_tensors(self, name: str, p: nn.Parameter) -> dict[str, Tensor]:
        """Return a parameter's tensors that other ranks hold with equal bits, by role; full or empty."""
        return {}

    def working_part(self, name: str, p: nn.Parameter) -> Tensor:
        """Return this rank's part of the weight that forward reads."""
        return p.detach()

    def working_start(self, p: nn.Parameter) -> int:
        """Return where that part starts in the parameter as this rank held it before ZeRO."""
        return 0

    def working_replicas(self, name: str) -> ProcessGroup | None:
        """Return the ranks that all hold this rank's ``working_part``; None if no other rank does."""
        return self._tensors.replicas(name)

    @abstractmethod
    def refresh_weights(self) -> None:
        """Make forward read the values written to masters. Collective."""

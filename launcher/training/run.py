"""``Run``: shared state of a run's steps, and ``Progress``: its position between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_pipeline.loader import Loader, ValidationLoader
from data_pipeline.rows.batches import Share
from launcher.checkpoint.save import Carried
from launcher.checkpoint.saver import Saver, run_saver
from launcher.cluster.stopping import Stop
from launcher.config.resolved import ResolvedConfig
from launcher.metrics.expert_load import expert_layers
from launcher.training.feed import StepData, StepFeed
from launcher.training.history import History
from launcher.training.model import share_of
from launcher.training.origin import Origin
from launcher.training.routing_files import RoutingFiles
from launcher.training.start import Expected
from longctx.batch import PackedDocuments
from longctx.config import ModelConfig
from parallel.mesh import Mesh
from parallel.schedule.degrees import degrees_of
from parallel.zero.engine import ZeroEngine


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Position of a run between two steps. Each step returns a new one."""

    step: int = 0
    """Optimiser steps taken."""
    expert_load_LE: Tensor | None = None
    """How many tokens chose each expert in the last step; None before the first, and in a dense model."""
    history: History = field(default_factory=History)
    """What the steps before say of the next one."""
    stop_asked: bool = False
    """Whether any rank has been asked to stop: the run ends here."""
    validation_due: bool = False
    """Whether the validation after this step was left out, or broken off, because of that."""

    def state(self) -> dict[str, Any]:
        """Return the progress as stored in a checkpoint."""
        expert_load = []
        if self.expert_load_LE is not None:
            expert_load = self.expert_load_LE.tolist()
        return {
            "step": self.step,
            # Fewer if some were left out. The optimizer corrects its moments' beginning by this number.
            "optimizer_steps": self.step - self.history.skipped,
            "expert_load": expert_load,
            "history": self.history.state(),
            "validation_due": self.validation_due,
        }


@dataclass(frozen=True, kw_only=True)
class Run:
    """Shared state of a run's steps. Built once, by ``build_run``; its fields are never replaced."""

    config: ResolvedConfig
    model: ModelConfig
    mesh: Mesh
    device: torch.device
    folder: Path
    loader: Loader
    validation: ValidationLoader | None
    """None where the run never validates."""
    engine: ZeroEngine
    routing: RoutingFiles
    origin: Origin
    model_type: str | None
    """Hugging Face's type of the model that the weights came from, which an export keeps; None of new weights."""
    progress: Progress
    """Where the run begins."""
    tokenizer_files: dict[str, bytes]
    """What every checkpoint holds of the tokenizer, by name; read by rank 0 alone."""
    carried: Carried | None
    """What every checkpoint holds of an imported model's other parts; known to rank 0 alone."""
    expected: Expected
    """What the plan says of a step."""
    stop: Stop
    """What asks this rank to end the run."""

    @property
    def is_rank_0(self) -> bool:
        """True if this process writes the run's files and the console."""
        return self.mesh.rank == 0

    @cached_property
    def feed(self) -> StepFeed:
        """Data of the remaining steps, in order."""
        measure = None
        if self.is_rank_0 and self.config.parallel.tokens_per_rank:
            measure = partial(degrees_of, causal=self.model.causal)
        return StepFeed(
            self.loader,
            self.place,
            self.place_source,
            num_steps=max(0, self.config.last_step - self.progress.step),
            device=self.device,
            prefetch_steps=self.config.data.prefetch_steps,
            workers=self.config.data.workers,
            measure=measure,
        )

    @cached_property
    def saver(self) -> Saver:
        """Writer of the run's checkpoints."""
        step, ranks_here = self.progress.step, self.mesh.ranks_per_node
        beside = self.tokenizer_files, self.carried
        return run_saver(self.config, self.engine, self.model, *beside, step=step, ranks_here=ranks_here)

    @property
    def expert_layers(self) -> list[int]:
        """Layers that have experts: the rows of every tensor with an L axis."""
        return expert_layers(self.model)

    def place(self, documents: PackedDocuments) -> Share:
        """Return this rank's share of the tokens of a micro-batch with these documents."""
        return share_of(documents, self.config, self.mesh)

    def place_source(self, documents: PackedDocuments) -> Share:
        """Return this rank's share of the tokens of a micro-batch's source."""
        return share_of(documents, self.config, self.mesh, of_source=True)

    def first_tokens(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the indices, among all tokens of a step, of the first tokens of these rows."""
        return tuple(row * self.config.data.seq_len for row in rows)

    def first_source_tokens(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the same for the rows of sources."""
        return tuple(row * self.config.data.source_seq_len for row in rows)

    def token_indices(self, data: StepData) -> list[Tensor]:
        """Return, for each of a step's micro-batches, the indices of this rank's tokens among all tokens of the step.

        −1 marks padding of a micro-batch for its ranks.
        """
        found, row_tokens = [], self.config.data.seq_len
        for rows, shard in zip(data.rows, data.shards, strict=True):
            index = shard.placement.indices(self.mesh.context_rank)
            row, place = index // row_tokens, index % row_tokens
            first = torch.tensor(self.first_tokens(rows))[row.clamp(max=len(rows) - 1)]
            found.append(torch.where(row < len(rows), first + place, -1))
        return found

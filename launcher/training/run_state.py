"""``TrainingRun``: state shared by a run's steps, and ``Progress``: its position between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_pipeline.loader import Loader, ValidationLoader
from data_pipeline.rows.row_batches import Share
from launcher.checkpoint.background_saver import Saver, run_saver
from launcher.checkpoint.checkpoint_files import StaticFiles
from launcher.cluster.stop_request import StopRequest
from launcher.config.resolved import ResolvedConfig
from launcher.metrics.expert_load import expert_layers
from launcher.training.history import History
from launcher.training.routing_files import RoutingFiles
from launcher.training.run_origin import RunOrigin, find_base_entry
from launcher.training.start import Expected
from launcher.training.step_prefetch import StepData, StepPrefetcher
from launcher.training.task_builder import share_of
from longctx.batch import PackedDocuments
from longctx.config import ModelConfig
from parallel.mesh import Mesh
from parallel.schedule.degrees import degrees_of
from parallel.zero.zero_engine import ZeroEngine


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A run's position between two steps. Each step returns a new one."""

    step: int = 0
    """Steps taken or skipped so far."""
    expert_load_LE: Tensor | None = None
    """Tokens per expert in the last step; None before the first, and in a dense model."""
    history: History = field(default_factory=History)
    """Statistics from previous steps for the next one."""
    stop_requested: bool = False
    """True if any rank was asked to stop: the run ends here."""
    validation_due: bool = False
    """True if a stop prevented or interrupted the validation after this step."""

    def state(self) -> dict[str, Any]:
        """Return the progress as stored in a checkpoint."""
        expert_load = []
        if self.expert_load_LE is not None:
            expert_load = self.expert_load_LE.tolist()
        return {
            "step": self.step,
            # Fewer if some were skipped. The optimizer's bias correction uses this number.
            "optimizer_steps": self.step - self.history.skipped,
            "expert_load": expert_load,
            "history": self.history.state(),
            "validation_due": self.validation_due,
        }


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """State shared by a run's steps. Built once, by ``build_run``; its fields are never replaced."""

    config: ResolvedConfig
    model: ModelConfig
    mesh: Mesh
    device: torch.device
    folder: Path
    loader: Loader
    validation: ValidationLoader | None
    """None if the run never validates."""
    engine: ZeroEngine
    routing: RoutingFiles
    origin: RunOrigin
    model_type: str | None
    """Hugging Face type of the imported model, which an export keeps; None for new weights."""
    progress: Progress
    """Progress at which the run begins."""
    tokenizer_files: dict[str, bytes]
    """Tokenizer files that every checkpoint includes, by name; read by rank 0 only."""
    extra_files: StaticFiles | None
    """An imported model's other files that every checkpoint includes; known to rank 0 only."""
    expected: Expected
    """The plan's estimate for a step."""
    stop: StopRequest
    """Source of stop requests to this rank."""

    @property
    def is_rank_0(self) -> bool:
        """True on the rank that writes files and console output."""
        return self.mesh.rank == 0

    @cached_property
    def prefetcher(self) -> StepPrefetcher:
        """Data for the remaining steps, in order."""
        # Only rank 0 records degrees.
        compute_degrees = None
        if self.is_rank_0 and self.config.parallel.tokens_per_rank:
            compute_degrees = partial(degrees_of, causal=self.model.causal)
        return StepPrefetcher(
            self.loader,
            self.place,
            self.place_source,
            num_steps=max(0, self.config.last_step - self.progress.step),
            device=self.device,
            prefetch_steps=self.config.data.prefetch_steps,
            workers=self.config.data.workers,
            compute_degrees=compute_degrees,
        )

    @cached_property
    def saver(self) -> Saver:
        """The run's checkpoint writer."""
        step, local_ranks = self.progress.step, self.mesh.ranks_per_node
        file_args = self.tokenizer_files, self.extra_files
        base = find_base_entry(self.origin, self.model, self.folder)
        return run_saver(
            self.config, self.engine, self.model, *file_args, step=step, local_ranks=local_ranks, base=base
        )

    @property
    def expert_layers(self) -> list[int]:
        """Layers with experts: the rows in every tensor with an L axis."""
        return expert_layers(self.model)

    def place(self, documents: PackedDocuments) -> Share:
        """Return this rank's shard of a micro-batch's tokens with these documents."""
        return share_of(documents, self.config, self.mesh)

    def place_source(self, documents: PackedDocuments) -> Share:
        """Return this rank's shard of a micro-batch's source tokens."""
        return share_of(documents, self.config, self.mesh, of_source=True)

    def first_tokens(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the first token's index in the step for each of these rows."""
        return tuple(row * self.config.data.seq_len for row in rows)

    def first_source_tokens(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the same for source rows."""
        return tuple(row * self.config.data.source_seq_len for row in rows)

    def token_indices(self, data: StepData) -> list[Tensor]:
        """Return this rank's token indices in the step, for each micro-batch.

        −1 marks a micro-batch's padding for its ranks.
        """
        found, row_tokens = [], self.config.data.seq_len
        for rows, shard in zip(data.rows, data.shards, strict=True):
            index = shard.placement.indices(self.mesh.context_rank)
            # A micro-batch's rows are concatenated before they are sharded.
            row, place = index // row_tokens, index % row_tokens
            first = torch.tensor(self.first_tokens(rows))[row.clamp(max=len(rows) - 1)]
            found.append(torch.where(row < len(rows), first + place, -1))
        return found

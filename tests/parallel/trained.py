"""Tiny models trained for a few steps, in one process and over ranks: the losses and gradient norms of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from longctx.batch import Batch, Stream
from longctx.objectives.task import Task
from parallel.comm.world import sum_over_ranks
from parallel.loss import count_step
from parallel.mesh import Mesh
from parallel.zero.optimizer import OptimizerOptions
from parallel.zero.zero_engine import ZeroEngine
from parallel.zero.zero_state import ReadRange

STEPS, ROWS, CLIP, LR, BETAS, EPS, WEIGHT_DECAY = 3, 4, 0.5, 1e-3, (0.9, 0.95), 1e-8, 0.1
OPTIONS = OptimizerOptions(betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, clip_norm=CLIP)

StepRows = Callable[[int], Sequence[Stream]]
"""The ``ROWS`` rows of a step."""


class Trained(NamedTuple):
    """A value per step."""

    losses: list[float]
    norms: list[float]

    def check(self, wanted: Trained, bound: float, where: str) -> None:
        """Compare with one process."""
        for got, want in zip(self, wanted, strict=True):
            error = max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))
            assert error <= bound, f"{where}: {got} instead of {want}"


def adamw(task: Task) -> torch.optim.Optimizer:
    """PyTorch's AdamW, which decays matrices."""
    trained = [p for p in task.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)


def train_alone(
    task: Task, rows: StepRows, optimizer: torch.optim.Optimizer | None = None, *, clip_norm: float = CLIP
) -> Trained:
    """One process, in float64: in float32 its own norms would be off by as much as is allowed to ranks.

    Every norm must be above ``clip_norm``.
    """
    task = task.double()
    optimizer, trained = optimizer or adamw(task), Trained([], [])
    for number in range(STEPS):
        batches = [_prepared(task, row) for row in rows(number)]
        counts = task.count(batches)
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            loss = task.loss(task.loss_sum(task(batch)), counts)
            loss.backward()
            total += float(loss.detach())
        trained.norms.append(float(torch.nn.utils.clip_grad_norm_(task.parameters(), clip_norm)))
        optimizer.step()
        trained.losses.append(total)
    assert min(trained.norms) > clip_norm, "clipping must be active"
    return trained


def train_over_ranks(
    task: Task,
    mesh: Mesh,
    rows: StepRows,
    split: Callable[[Stream], Stream],
    *,
    stage: int,
    options: OptimizerOptions = OPTIONS,
    dtype: torch.dtype = torch.float32,
    read: ReadRange | None = None,
) -> Trained:
    """The same rows under ZeRO; ``split`` takes a rank's part of a row, ``read`` reads a meta model's weights."""
    engine = ZeroEngine(task, stage=stage, dtype=dtype, accumulation=ROWS // mesh.data, options=options)
    if read is not None:
        engine.load(read, step=0, moments=False)
    trained = Trained([], [])
    for number in range(STEPS):
        mine = [split(row) for row in rows(number)[mesh.data_rank :: mesh.data]]
        counts = count_step(engine.model, mine)
        total = torch.zeros((), dtype=torch.float64)
        for row in mine:
            loss = engine.model.loss(engine.forward(_prepared(engine.model, row)), counts)
            total += loss.detach().double()
            engine.backward(loss)
        trained.norms.append(engine.step(LR))
        trained.losses.append(float(sum_over_ranks(total)))
    return trained


def _prepared(task: Task, row: Stream) -> Batch:
    if isinstance(row, Batch):
        return row
    return task.prepare(row)

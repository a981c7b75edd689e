"""What a run says before its first step: what it is, what it may not have meant, and what it will take."""

from __future__ import annotations

import logging
import shutil

import torch

from data_pipeline.loader import Loader
from launcher.config.resolve import Choice
from launcher.config.resolved import ResolvedConfig
from launcher.config.side_by_side import padded_documents
from launcher.plan.memory import free_bytes, memory_of_rank
from launcher.plan.world import World
from launcher.training.model import build_layout
from launcher.training.origin import Origin
from launcher.training.planned import Expected, check_planned_memory, expect
from launcher.training.summary import Start, summary, warnings
from longctx.config import ModelConfig
from parallel.mesh import Mesh
from parallel.runtime.device import device_name
from parallel.schedule.degrees import Degrees, degrees_of

log = logging.getLogger(__name__)


def say_choice(choice: Choice) -> None:
    """Log what a step of ``resolve`` chose, and why."""
    level = logging.INFO
    if choice.is_warning:
        level = logging.WARNING
    log.log(level, "%s", choice.why)


def say_start(
    config: ResolvedConfig,
    model: ModelConfig,
    device: torch.device,
    origin: Origin,
    loader: Loader,
    *,
    mesh: Mesh,
) -> Expected:
    """Log what the run is, what it may not have meant, and what it will take; ConfigError if it has less memory."""
    start = Start(
        config=config,
        model=model,
        mesh=mesh,
        device=device_name(device),
        origin=origin,
        memory=memory_of_rank(config, model, mesh.world_size),
        free_bytes=free_bytes(device),
        free_disk_bytes=shutil.disk_usage(config.run.output_dir).free,
        packing=loader.pack_report(),
        forecast=loader.forecast(max(0, config.last_step - origin.step)),
        degrees=first_degrees(config, mesh, loader),
    )
    for line in summary(start):
        log.info("%s", line)
    for line in warnings(start):
        log.warning("%s", line)
    expected = expect(
        config,
        World(ranks=mesh.world_size, ranks_per_node=mesh.ranks_per_node),
        padded_documents(config, loader.next_documents()[0]),
        device_name=device_name(device),
        steps=start.num_steps,
    )
    check_planned_memory(config, expected, ranks_here=mesh.ranks_per_node, free_bytes=start.free_bytes)
    log.info("%s", expected.line())
    return expected


def first_degrees(config: ResolvedConfig, mesh: Mesh, loader: Loader) -> list[Degrees]:
    """Return how the micro-batches of the next step come to lie on this rank's group; none if the degree is fixed."""
    if not config.parallel.tokens_per_rank:
        return []
    found = []
    for documents in loader.next_documents():
        padded = padded_documents(config, documents)
        found.append(degrees_of(build_layout(config, mesh, padded), padded))
    return found

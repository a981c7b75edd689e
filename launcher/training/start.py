"""Messages before a run's first step: its description, warnings about likely mistakes, and its expected cost."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from data_pipeline.loader import Loader
from launcher.config.resolve import Choice
from launcher.config.resolved import ResolvedConfig
from launcher.config.tokens_per_rank_rules import padded_documents
from launcher.metrics.record import Record
from launcher.plan.estimate import estimate_ranks
from launcher.plan.hardware import FOLDER, MEASURED, MEASURED_FILE, Hardware, load_hardware
from launcher.plan.memory_estimate import free_memory_bytes, gib, memory_of_rank
from launcher.plan.planned_world import World
from launcher.plan.seconds import StepSeconds, slowest
from launcher.plan.zero_bytes import StepBytes
from launcher.run_folder import LOGS
from launcher.training.run_origin import RunOrigin
from launcher.training.summary import Start, details, header, outlook, warnings
from launcher.training.task_builder import batch_layout
from launcher.wording import ONLY_IN_FILE, short_duration
from longctx.batch import PackedDocuments
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from parallel.mesh import Mesh
from parallel.runtime.device import device_name
from parallel.schedule.degrees import Degrees, degrees_of

log = logging.getLogger(__name__)


def say_choice(choice: Choice) -> None:
    """Log a choice made by ``resolve``, and the reason."""
    if choice.is_warning:
        log.warning("%s", choice.why)
    else:
        log.info("%s", choice.why, extra={ONLY_IN_FILE: True})


def say_start(
    config: ResolvedConfig,
    model: ModelConfig,
    device: torch.device,
    origin: RunOrigin,
    loader: Loader,
    *,
    mesh: Mesh,
) -> Expected:
    """Log the run's description, warnings and expected cost; raise ConfigError if memory is insufficient.

    The console shows a summary, the log everything.
    """
    start = Start(
        config=config,
        model=model,
        mesh=mesh,
        device=device_name(device),
        origin=origin,
        memory=memory_of_rank(config, model, mesh.world_size),
        free_bytes=free_memory_bytes(device),
        free_disk_bytes=shutil.disk_usage(config.run.output_dir).free,
        packing=loader.pack_report(),
        source_estimate=loader.estimate_usage(max(0, config.last_step - origin.step)),
        degrees=first_degrees(config, mesh, loader),
    )
    for line in header(start):
        log.info("%s", line)
    for line in details(start):
        log.info("%s", line, extra={ONLY_IN_FILE: True})
    for line in warnings(start):
        log.warning("%s", line)
    expected = estimate_step(
        config,
        World(ranks=mesh.world_size, ranks_per_node=mesh.ranks_per_node),
        padded_documents(config, loader.next_documents()[0]),
        device_name=device_name(device),
        steps=start.num_steps,
    )
    # Before the model allocates memory.
    check_planned_memory(config, expected, local_ranks=mesh.ranks_per_node, free_bytes=start.free_bytes)
    log.info("%s", expected.line(), extra={ONLY_IN_FILE: True})
    seconds = None
    if expected.seconds is not None:
        seconds = expected.seconds.total
    rest = Path(config.run.output_dir) / LOGS / "rank_0.log"
    log.info("%s Full plan: %s", outlook(start, expected.bytes.peak, seconds), rest)
    return expected


def first_degrees(config: ResolvedConfig, mesh: Mesh, loader: Loader) -> list[Degrees]:
    """Return rank placement for the next step's micro-batches on this rank's group; empty if the degree is fixed."""
    if not config.parallel.tokens_per_rank:
        return []
    found = []
    for documents in loader.next_documents():
        padded = padded_documents(config, documents)
        found.append(degrees_of(batch_layout(config, mesh, padded), padded, causal=config.model.config().causal))
    return found


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Estimate for one step: bytes on the rank that needs most, and seconds on the slowest one."""

    hardware: str
    bytes: StepBytes
    host_bytes: int
    """Host memory per rank, in addition to a GPU's own."""
    seconds: StepSeconds | None
    """None on a GPU without a profile."""
    steps: int
    """Steps that this process takes."""

    def line(self) -> str:
        """Return one line for the log."""
        b = self.bytes
        parts = {
            "program": b.process,
            "weights": b.weights + b.gathered,
            "gradients": b.gradients + b.reduction,
            "optimizer": b.optimizer,
            "kept": b.kept,
            "passing": b.passing,
        }
        parts_text = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
        line = f"Plan: {gib(b.peak)} per rank at the peak ({parts_text})"
        if self.host_bytes:
            line += f", {gib(self.host_bytes)} on its host"
        if self.seconds is None:
            return f"{line}; no profile has rates for {self.hardware}."
        total = self.seconds.total
        return (
            f"{line}; {total:.3g} s per step, {short_duration(total * self.steps)} for all steps, on {self.hardware}."
        )

    def record(self, step: int) -> Record:
        """Return the estimate for metrics.jsonl."""
        found: Record = {
            "kind": "event",
            "event": "plan",
            "step": step,
            "hardware": self.hardware,
            "peak_bytes": self.bytes.peak,
            "bytes": dataclasses.asdict(self.bytes),
            "host_bytes": self.host_bytes,
        }
        if self.seconds is not None:
            found |= {"step_seconds": self.seconds.total, "seconds": dataclasses.asdict(self.seconds)}
        return found


def estimate_step(
    config: ResolvedConfig, world: World, documents: PackedDocuments, *, device_name: str, steps: int
) -> Expected:
    """Estimate a step for a resolved ``config``; ``documents`` are a micro-batch's on this rank's context group.

    ``device_name`` is "cpu" or a GPU's name.
    """
    known = find_hardware(device_name)
    # Bytes do not depend on the GPU's speed.
    hardware = known or load_hardware("h100")
    if hardware.device_type == "cpu":
        rss_bytes = psutil.Process().memory_info().rss
        hardware = dataclasses.replace(hardware, process_bytes=max(rss_bytes, hardware.process_bytes))
    ranks, host_bytes = estimate_ranks(config, world, hardware, documents)
    seconds, name = None, device_name
    if known is not None:
        seconds, name = slowest([rank.seconds for rank in ranks]), known.name
    # The rank with the highest peak need not be the slowest one.
    largest = max((rank.bytes for rank in ranks), key=lambda of_rank: of_rank.peak)
    return Expected(hardware=name, bytes=largest, host_bytes=host_bytes, seconds=seconds, steps=steps)


def find_hardware(device_name: str) -> Hardware | None:
    """Return the profile for a run's devices: one that ``measure`` wrote into the working folder, or an included one.

    Return None for a GPU without either. Raise ConfigError if the measured one cannot be read.
    """
    device_type = "cuda"
    if device_name == "cpu":
        device_type = "cpu"
    # A measured profile comes before the included ones, if it is for the same device type.
    if Path(MEASURED_FILE).is_file():
        measured = load_hardware(MEASURED)
        if measured.device_type == device_type:
            return measured
    if device_type == "cpu":
        return load_hardware("cpu")
    shipped = sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != "cpu")
    # A profile's file name is part of the device name, such as h100 in "NVIDIA H100 80GB HBM3".
    return next((load_hardware(profile) for profile in shipped if profile.upper() in device_name.upper()), None)


def check_planned_memory(config: ResolvedConfig, expected: Expected, *, local_ranks: int, free_bytes: int) -> None:
    """Raise ConfigError if a rank's peak exceeds free memory: a GPU's, or on a CPU that for all local ranks."""
    if not config.run.memory_check:
        return
    needs, memory_name = expected.bytes.peak, "on its GPU"
    if expected.bytes.process:
        # The ranks' programs are already allocated, so free memory does not include them.
        needs, memory_name = local_ranks * (needs - expected.bytes.process), f"for this machine's ranks ({local_ranks})"
    if needs <= free_bytes:
        return
    raise ConfigError(
        f"This run does not fit: its plan needs {gib(expected.bytes.peak)} per rank at the peak, and "
        f"{gib(free_bytes)} are free {memory_name}.\n{expected.line()}\n`longctx plan --search` with the same config "
        "finds settings that fit. --run.memory_check false starts anyway."
    )

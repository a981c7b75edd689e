"""The ranks' machine as ``resolve`` sees it: properties that all ranks have, gathered from each."""

from __future__ import annotations

import dataclasses
from functools import cache

import torch

from launcher.config.config_sections import RunConfig
from launcher.config.resolve import TargetMachine
from launcher.config.resolved import AUTO, ResolvedConfig
from launcher.plan.estimate import HEADROOM, fits, peak_bytes
from launcher.plan.hardware import Hardware, load_hardware
from launcher.plan.memory_estimate import gib
from launcher.plan.planned_world import World
from launcher.training.start import find_hardware
from longctx.kernels.memory import available_bytes
from longctx.kernels.processor import has_native_bfloat16
from longctx.kernels.regions import missing_for_compiling
from parallel.comm.world import broadcast_object, gather_objects, num_ranks
from parallel.mesh import Mesh
from parallel.runtime.device import device_name, free_device_bytes


def device_of_ranks(device: torch.device) -> TargetMachine:
    """Return the machine with rank 0's device type, which applies to all if hosts differ. Collective."""
    native = device.type == "cuda" or has_native_bfloat16()
    native, device_type = broadcast_object((native, device.type))
    return TargetMachine(ranks=num_ranks(), device_type=device_type, native_bfloat16=native)


def machine_of_ranks(machine: TargetMachine, config: RunConfig, mesh: Mesh, device: torch.device) -> TargetMachine:
    """Return ``machine`` with the compilers and free memory that ``config`` depends on. Collective."""
    requested = config.train.compile
    if requested == "on" or (requested == AUTO and machine.device_type != "cpu"):
        # Every rank compiles, so one host without a compiler decides for all.
        problems = gather_objects(missing_for_compiling(device.type))
        first = next((f"on rank {rank} {problem}" for rank, problem in enumerate(problems) if problem), "")
        machine = dataclasses.replace(machine, compile_problem=first)
    if config.train.chunk_tokens == AUTO:
        machine = _with_memory(machine, mesh, device)
    return machine


def _with_memory(machine: TargetMachine, mesh: Mesh, device: torch.device) -> TargetMachine:
    """Return the machine with the least free memory on any rank."""
    free = gather_objects((free_device_bytes(device), available_bytes(with_growth=True) // mesh.ranks_per_node))
    on_device, on_host = (min(of_ranks) for of_ranks in zip(*free, strict=True))
    world = World(ranks=mesh.world_size, ranks_per_node=mesh.ranks_per_node)

    # Read once, and by the calling rank: a measured profile is in rank 0's working folder.
    @cache
    def hardware() -> Hardware:
        profile = find_hardware(device_name(device)) or load_hardware("h100")
        # The program's own memory is already allocated.
        return dataclasses.replace(profile, memory_bytes=on_device, host_memory_bytes=on_host, process_bytes=0)

    def is_enough(config: ResolvedConfig) -> bool:
        return fits(config, world, hardware(), share=1 - HEADROOM)

    def describe_memory(config: ResolvedConfig) -> str:
        return f": a rank's peak is {gib(peak_bytes(config, world, hardware()))}, and {gib(on_device)} are free"

    return dataclasses.replace(machine, fits=is_enough, memory=describe_memory)

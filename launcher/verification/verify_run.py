"""``verify_run``: shrink the run, compute it in parallel and in one process, and compare."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from launcher.config.config_sections import RunConfig
from launcher.config.resolve import Data, resolve, resolve_without_data
from launcher.config.resolved import ResolvedConfig
from launcher.config.run_config_rules import check_run
from launcher.training.rank_machine import device_of_ranks, machine_of_ranks
from launcher.training.start import say_choice
from launcher.verification.compare import GRADIENT_ERROR_BOUND, StepError, compare_steps
from launcher.verification.leak_probe import LeakProbe, probe_text
from launcher.verification.parallel_steps import steps_together
from launcher.verification.shrink import shrink
from launcher.verification.single_process import SingleProcess
from parallel.comm.world import on_rank_0
from parallel.mesh import Mesh


@dataclass(frozen=True)
class VerifyResult:
    """Text for rank 0 to print, and True if all errors are within bounds; the same on every rank."""

    text: str
    held: bool


def verify_run(requested: RunConfig, device: torch.device) -> VerifyResult:
    """Compare steps with the requested config, shrunk, to the same steps in one process. Collective.

    Raise ConfigError if a run would be rejected.
    """
    started = time.perf_counter()
    config, mesh, changes = _small_run(requested, device)
    got = list(steps_together(config, mesh, device))

    def evaluate() -> VerifyResult:
        exact = SingleProcess(config, mesh.world_size, torch.float32, device)
        start, wanted, other = exact.weights(), list(exact.steps(got)), None
        # A second reference in the run's dtype measures rounding.
        if config.dtype != torch.float32:
            other = list(SingleProcess(config, mesh.world_size, config.dtype, device).steps(got))
        errors = compare_steps(got, wanted, start, other, model=exact.model)
        description = f"{_describe(config, mesh, device)}, compared with a single process: three steps."
        text = comparison_text(errors, changes, description, time.perf_counter() - started)
        return VerifyResult(text, all(error.held for error in errors))

    # The other ranks wait without a timeout.
    return on_rank_0(evaluate)


def probe_run(requested: RunConfig, device: torch.device) -> VerifyResult:
    """Test if documents in a row affect each other, with the requested config, shrunk. Collective.

    Raise ConfigError if a run would be rejected.
    """
    started = time.perf_counter()
    config, mesh, _ = _small_run(requested, device)
    # Tokens beyond an expert's capacity are dropped across documents, which is no leak in attention.
    config = replace(config, model=replace(config.model, capacity_factor=0.0))
    found = LeakProbe(config, mesh, device).run()
    text, held = probe_text(found, _describe(config, mesh, device), started, config.train.dtype)
    return VerifyResult(text, held)


def _small_run(requested: RunConfig, device: torch.device) -> tuple[ResolvedConfig, Mesh, tuple[str, ...]]:
    """Return a run's shrunk config, its mesh, and the changes. Collective."""
    machine, data = device_of_ranks(device), Data(is_packed=True)
    resolved = resolve_without_data(requested, machine)
    parallel = resolved.parallel
    mesh = Mesh.build(context=parallel.context, ulysses=parallel.ulysses, expert=parallel.expert)
    machine = machine_of_ranks(machine, resolved, mesh, device)
    shrunk = shrink(on_rank_0(lambda: resolve(resolved, machine, data, say=say_choice)), mesh.world_size)
    check_run(shrunk.config, mesh.world_size)
    # Shorter rows may be distributed differently over the ranks.
    return resolve(shrunk.config, machine, data), mesh, shrunk.changes


def _describe(config: ResolvedConfig, mesh: Mesh, device: torch.device) -> str:
    parallel, train = config.parallel, config.train
    chunks = ""
    if config.train.chunk_tokens:
        chunks = f", {config.train.chunk_tokens}-token chunks, {train.head_groups} head groups"
    return (
        f"{mesh.world_size} ranks on {device.type} (data {mesh.data} × context {mesh.context}, ulysses {mesh.ulysses}, "
        f"expert {mesh.expert}), {parallel.layout}, {parallel.transport}, ZeRO {config.zero.stage}, {train.dtype}, "
        f"keep {train.keep} on {train.store}{chunks}"
    )


_SHOWN = 8
"""Limit on failed results shown."""


def comparison_text(errors: Sequence[StepError], changes: Sequence[str], description: str, seconds: float) -> str:
    """Describe the comparison, the largest errors, and the first part beyond its bound."""
    lines = [description]
    if changes:
        lines.append("Reduced for the comparison: " + "; ".join(changes) + ".")
    lines.append("")
    # For each kind, the error closest to its bound, or furthest beyond it.
    lines.append(f"{'step':>4}  {'what':<14}{'largest error':>14}{'bound':>10}  part")
    for step in sorted({error.step for error in errors}):
        for metric in ("experts chosen", "loss", "gradient norm", "gradients", "weights"):
            of_kind = [error for error in errors if (error.step, error.metric) == (step, metric)]
            if of_kind:
                # A bound may be 0: then any error exceeds it.
                worst = max(of_kind, key=lambda error: error.error / max(error.bound, 1e-30))
                lines.append(f"{step:>4}  {metric:<14}{worst.error:>14.1e}{worst.bound:>10.0e}  {worst.part}")
    if any(error.metric == "gradients" and error.bound == GRADIENT_ERROR_BOUND for error in errors):
        lines.append("Gradient errors are relative to a single bfloat16 process's error, which is 1.")
    lines.append("")
    failed = [error for error in errors if not error.held]
    if not failed:
        lines.append(f"They agree: {len(errors)} values within their bounds, {seconds:.0f} s.")
        return "\n".join(lines)
    # In the order of computation: the first wrong part may cause the others.
    first = failed[0]
    part = first.part or "the entire step"
    by = f"by {first.error:.2g} (bound {first.bound:.0e})"
    lines.append(f"They differ, first in step {first.step}: {first.metric} in {part}, {by}.")
    named = [f"{error.part or 'whole'} ({error.error:.1e})" for error in failed if error.step == first.step]
    num_hidden = len(named) - _SHOWN
    lines.append("In that step: " + ", ".join(named[:_SHOWN]) + (f", {num_hidden} more." if num_hidden > 0 else "."))
    return "\n".join(lines)

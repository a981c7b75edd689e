"""``verify_run``: shrink the run, compute it in parallel and in one process, and compare."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from launcher.config.check import check_run
from launcher.config.resolve import Data, resolve, settle
from launcher.config.resolved import ResolvedConfig
from launcher.config.sections import RunConfig
from launcher.training.machine import device_of_ranks, machine_of_ranks
from launcher.training.start import say_choice
from launcher.verification.alone import Alone
from launcher.verification.compare import GRADIENT_ERROR_BOUND, Finding, compare
from launcher.verification.leaks import Probe, probe_text
from launcher.verification.shrink import shrink
from launcher.verification.together import steps_together
from parallel.comm.world import on_rank_0
from parallel.mesh import Mesh


@dataclass(frozen=True)
class Verdict:
    """Text for rank 0 to print, and True if all errors are within bounds; the same on every rank."""

    text: str
    held: bool


def verify_run(asked: RunConfig, device: torch.device) -> Verdict:
    """Compare steps with the requested config, shrunk, to the same steps in one process. Collective.

    Raise ConfigError if a run would be rejected.
    """
    started = time.perf_counter()
    config, mesh, changes = _small_run(asked, device)
    got = list(steps_together(config, mesh, device))

    def judge() -> Verdict:
        exact = Alone(config, mesh.world_size, torch.float32, device)
        start, wanted, other = exact.weights(), list(exact.steps(got)), None
        # A second reference in the run's dtype measures rounding.
        if config.dtype != torch.float32:
            other = list(Alone(config, mesh.world_size, config.dtype, device).steps(got))
        findings = compare(got, wanted, start, other, model=exact.model)
        described = f"{_described(config, mesh, device)}, beside one plain process: three steps."
        text = report(findings, changes, described, time.perf_counter() - started)
        return Verdict(text, all(finding.held for finding in findings))

    # The other ranks wait without a timeout.
    return on_rank_0(judge)


def probe_run(asked: RunConfig, device: torch.device) -> Verdict:
    """Test if documents in a row affect each other, with the requested config, shrunk. Collective.

    Raise ConfigError if a run would be rejected.
    """
    started = time.perf_counter()
    config, mesh, _ = _small_run(asked, device)
    # Tokens beyond an expert's capacity are dropped across documents, which is no leak in attention.
    config = replace(config, model=replace(config.model, capacity_factor=0.0))
    found = Probe(config, mesh, device).look()
    text, held = probe_text(found, _described(config, mesh, device), started, config.train.dtype)
    return Verdict(text, held)


def _small_run(asked: RunConfig, device: torch.device) -> tuple[ResolvedConfig, Mesh, tuple[str, ...]]:
    """Return a run's shrunk config, its mesh, and the changes. Collective."""
    machine, data = device_of_ranks(device), Data(is_packed=True)
    settled = settle(asked, machine)
    parallel = settled.parallel
    mesh = Mesh.build(context=parallel.context, ulysses=parallel.ulysses, expert=parallel.expert)
    machine = machine_of_ranks(machine, settled, mesh, device)
    shrunk = shrink(on_rank_0(lambda: resolve(settled, machine, data, say=say_choice)), mesh.world_size)
    check_run(shrunk.config, mesh.world_size)
    # Shorter rows may be distributed differently over the ranks.
    return resolve(shrunk.config, machine, data), mesh, shrunk.changes


def _described(config: ResolvedConfig, mesh: Mesh, device: torch.device) -> str:
    parallel, train = config.parallel, config.train
    chunks = ""
    if config.train.chunk_tokens:
        chunks = f", chunks of {config.train.chunk_tokens} tokens, {train.head_groups} groups of heads"
    return (
        f"{mesh.world_size} ranks on {device.type} (data {mesh.data} × context {mesh.context}, ulysses {mesh.ulysses}, "
        f"expert {mesh.expert}), {parallel.layout}, {parallel.transport}, ZeRO {config.zero.stage}, {train.dtype}, "
        f"keep {train.keep} on {train.store}{chunks}"
    )


_SHOWN = 8
"""Limit on failed results shown."""


def report(findings: Sequence[Finding], changes: Sequence[str], described: str, seconds: float) -> str:
    """Describe the comparison, the largest errors, and the first part beyond its bound."""
    lines = [described]
    if changes:
        lines.append("Made small for it: " + "; ".join(changes) + ".")
    lines.append("")
    # For each kind, the error closest to its bound, or furthest beyond it.
    lines.append(f"{'step':>4}  {'what':<14}{'largest error':>14}{'bound':>10}  part")
    for step in sorted({finding.step for finding in findings}):
        for what in ("experts chosen", "loss", "gradient norm", "gradients", "weights"):
            of_kind = [finding for finding in findings if (finding.step, finding.what) == (step, what)]
            if of_kind:
                # A bound may be 0: then any error exceeds it.
                worst = max(of_kind, key=lambda finding: finding.error / max(finding.bound, 1e-30))
                lines.append(f"{step:>4}  {what:<14}{worst.error:>14.1e}{worst.bound:>10.0e}  {worst.part}")
    if any(finding.what == "gradients" and finding.bound == GRADIENT_ERROR_BOUND for finding in findings):
        lines.append("Errors of gradients are in units of the error that one plain bfloat16 process has: 1 is its own.")
    lines.append("")
    broken = [finding for finding in findings if not finding.held]
    if not broken:
        lines.append(f"They agree: {len(findings)} figures within their bounds, {seconds:.0f} s.")
        return "\n".join(lines)
    # In the order of computation: the first wrong part may cause the others.
    first = broken[0]
    part = first.part or "the step as a whole"
    by = f"by {first.error:.2g} (bound {first.bound:.0e})"
    lines.append(f"They differ, first in step {first.step}: {first.what} of {part}, {by}.")
    named = [f"{finding.part or 'whole'} ({finding.error:.1e})" for finding in broken if finding.step == first.step]
    more = len(named) - _SHOWN
    lines.append("In that step: " + ", ".join(named[:_SHOWN]) + (f", {more} more." if more > 0 else "."))
    return "\n".join(lines)

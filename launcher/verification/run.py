"""``verify_run``: shrink, compute in both ways, compare."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from launcher.config.check import check_run
from launcher.config.sections import RunConfig
from launcher.config.side_by_side import settle_context
from launcher.training.chunks import settle_free_chunks
from launcher.training.compiling import settle_compile
from launcher.verification.alone import Alone
from launcher.verification.compare import Finding, compare
from launcher.verification.report import report
from launcher.verification.shrink import shrink
from launcher.verification.together import steps_together
from parallel.layout.select import AUTO, choose_layout
from parallel.mesh import Mesh
from parallel.runtime.process import on_rank_0


@dataclass(frozen=True)
class Verdict:
    """What rank 0 says, and whether all is well; the same on every rank."""

    text: str
    held: bool


def verify_run(config: RunConfig, device: torch.device) -> Verdict:
    """Take steps with ``config``, made small, and the same in one process. Collective.

    ``settle_context`` comes first. ConfigError for what a run would be refused for.
    """
    started = time.perf_counter()
    parallel = config.parallel
    mesh = Mesh.build(context=parallel.context, ulysses=parallel.ulysses, expert=parallel.expert)
    shrunk = shrink(settle_free_chunks(config, mesh, device), mesh.world_size)
    config = shrunk.config
    check_run(config, mesh.world_size)
    config = settle_context(config, mesh.world_size)
    if parallel.layout == AUTO:
        model = config.model
        layout, _ = choose_layout(
            num_tokens=config.data.seq_len * config.train.micro_batch_rows,
            degree=parallel.context,
            ulysses=parallel.ulysses,
            packed=True,
            layers=model.layers,
            window=model.window,
            side_by_side=parallel.tokens_per_rank > 0,
        )
        config = config.with_layout(layout)
    config = settle_compile(config, device)
    got = list(steps_together(config, mesh, device))

    def judge() -> Verdict:
        exact = Alone(config, mesh.world_size, torch.float32, device)
        start, wanted, other = exact.weights(), list(exact.steps(got)), None
        if config.dtype != torch.float32:
            other = list(Alone(config, mesh.world_size, config.dtype, device).steps(got))
        findings = compare(got, wanted, start, other, model=exact.model)
        text = report(findings, shrunk.changes, _described(config, mesh, device), time.perf_counter() - started)
        return Verdict(text, _held(findings))

    # The others wait, however long it takes.
    return on_rank_0(judge)


def _described(config: RunConfig, mesh: Mesh, device: torch.device) -> str:
    parallel, train = config.parallel, config.train
    chunks = ""
    if config.chunk_tokens:
        chunks = f", chunks of {config.chunk_tokens} tokens, {train.head_groups} groups of heads"
    return (
        f"{mesh.world_size} ranks on {device.type} (data {mesh.data} × context {mesh.context}, ulysses {mesh.ulysses}, "
        f"expert {mesh.expert}), {parallel.layout}, {parallel.transport}, ZeRO {config.zero_stage}, {train.dtype}, "
        f"keep {train.keep} on {train.store}{chunks}, beside one plain process: three steps."
    )


def _held(findings: list[Finding]) -> bool:
    return all(finding.held for finding in findings)

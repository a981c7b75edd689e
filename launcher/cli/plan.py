"""The verb ``plan``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import arg

from launcher.cli.console import Json, note, say, say_json, table
from longctx.errors import ConfigError

if TYPE_CHECKING:
    from launcher.config.sections import RunConfig
    from launcher.plan.world import World


def plan(
    *,
    trace: bool = False,
    config: Annotated[str | None, arg(metavar="F.toml")] = None,
    ranks: int = 0,
    ranks_per_node: int = 0,
    document_tokens: int = 0,
    capability: str = "9.0",
    json: Json = False,
    settings: Annotated[tuple[str, ...], tyro.conf.Suppress] = (),
) -> None:
    """Say what a run takes on GPUs, without one: memory, links, host waits.

    Takes the config and flags of pretrain.py, reads no data and starts nothing.
    --trace runs forward, backward and the optimiser of each kind of rank on tensors without data: seconds to a minute.
    It needs PyTorch's CUDA build, and no GPU.

    Args:
        trace: Trace one step of each kind of rank. The only way to plan that is built.
        config: The run's file, or a recipe's name.
        ranks: Ranks of the run; those of run.hostfile where it names a file, else as few as the degrees allow.
        ranks_per_node: Ranks of a machine; those of the hostfile, else 8.
        document_tokens: Length of the documents that rows are packed from; 0 is one document a row.
        capability: Compute capability of the GPU that kernels are chosen for, where this machine has none.
    """
    if not trace:
        raise ConfigError(
            "plan: only --trace is built yet. It traces one step of each kind of rank and counts its bytes; choosing "
            "degrees and predicting seconds is not built.\nAdd --trace."
        )
    for name, value in (("ranks", ranks), ("ranks-per-node", ranks_per_node), ("document-tokens", document_tokens)):
        if value < 0:
            raise ConfigError(f"--{name} {value} must be at least 1, or 0 as if it were left out.")
    from launcher.config.load import load_run_config
    from launcher.plan.report import heading, link_rows, memory_rows, remarks
    from launcher.plan.trace import check_cuda_build, trace_run

    check_cuda_build()
    argv = list(settings)
    if config is not None:
        argv[:0] = ["--config", config]
    run_config = load_run_config(argv)
    traced = trace_run(
        run_config,
        _world(run_config, ranks, ranks_per_node),
        document_tokens=document_tokens,
        capability=_capability(capability),
        progress=lambda kind: note(f"tracing {kind.describe()} …"),
    )
    if json:
        say_json(traced.to_json())
        return
    say(heading(traced))
    for headings, rows in (memory_rows(traced), link_rows(traced)):
        if rows:
            say(f"\n{table(headings, rows)}")
    say("\n" + "\n".join(remarks(traced)))


def _world(config: RunConfig, ranks: int, ranks_per_node: int) -> World:
    """The ranks that the flags, else the hostfile, else the degrees say."""
    from launcher.cluster.hostfile import read_hostfile
    from launcher.plan.world import World

    if config.run.hostfile not in ("launcher", "none"):
        slots = list(read_hostfile(Path(config.run.hostfile)).values())
        ranks, ranks_per_node = ranks or sum(slots), ranks_per_node or slots[0]
    return World.of(config, ranks, ranks_per_node)


def _capability(text: str) -> tuple[int, int]:
    """(9, 0) of "9.0"."""
    major, dot, minor = text.partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise ConfigError(f"--capability {text!r} is not one. Write 8.0 (A100), 9.0 (H100) or 10.0 (B200).")
    return int(major), int(minor)

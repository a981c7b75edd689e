"""The verb ``plan``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import arg

from launcher.cli.console import Json, note, progress, say, say_json, table
from launcher.cluster.exit import DONE, FAILED
from longctx.errors import ConfigError

if TYPE_CHECKING:
    from launcher.config.sections import RunConfig
    from launcher.plan.estimate import RunEstimate
    from launcher.plan.hardware import Hardware
    from launcher.plan.search import Candidate
    from launcher.plan.world import World


def plan(
    *,
    trace: bool = False,
    search: bool = False,
    output: Path | None = None,
    overwrite: bool = False,
    config: Annotated[str | None, arg(metavar="F.toml")] = None,
    ranks: int = 0,
    ranks_per_node: int = 0,
    document_tokens: int = 0,
    capability: str = "9.0",
    device: str = "h100",
    json: Json = False,
    settings: Annotated[tuple[str, ...], tyro.conf.Suppress] = (),
) -> int:
    """Say what a run takes before it starts: bytes of each device, seconds of a step, hours of the run.

    Takes the config and flags of `train`, reads no data and starts nothing. Bytes are arithmetic, seconds come from
    the rates of a hardware profile.
    --search tries degrees, ZeRO, offload, what is kept and where, chunks: it finds the fastest of the settings that
    fit, and what each GiB of memory buys. Those given as flags stay as they are. --output writes the config it found.
    The exit code is 1 if the run does not fit.
    --trace checks the plan: it runs forward, backward and the optimiser of each kind of rank on tensors without data,
    for memory, links and host waits of the code itself, in seconds to minutes. It needs PyTorch's CUDA build, no GPU.

    Args:
        trace: Trace one step of each kind of rank in place of arithmetic.
        search: Find the settings in place of taking the config's.
        output: With --search, the file to write.
        overwrite: Replace that file if it exists.
        config: The run's file, or a recipe's name.
        ranks: Ranks of the run; those of run.hostfile where it names a file, else as few as the degrees allow.
        ranks_per_node: Ranks of a machine; those of the hostfile, else 8.
        document_tokens: Length of the documents that rows are packed from; 0 is one document a row.
        capability: With --trace, the compute capability of the GPU that kernels are chosen for.
        device: Hardware to plan for: h100, h200, b200, cpu (an assumed core), measured (what `measure` wrote into the
            working folder), or a file like those profiles.
    """
    for name, value in (("ranks", ranks), ("ranks-per-node", ranks_per_node), ("document-tokens", document_tokens)):
        if value < 0:
            raise ConfigError(f"--{name} {value} must be at least 1, or 0 as if it were left out.")
    if output is not None and not search:
        raise ConfigError("--output is the file that --search writes. Add --search, or leave it out.")
    if search and trace:
        raise ConfigError("--search estimates many settings, --trace runs one. Trace what the search found.")
    if output is not None and output.exists() and not overwrite:
        raise ConfigError(f"--output {output} exists. Name another file, or replace it with --overwrite.")
    from launcher.config.flags import key_of_flag
    from launcher.config.load import load_run_config
    from launcher.plan.hardware import load_hardware
    from launcher.plan.world import World

    if trace:
        from launcher.trace.trace import check_cuda_build

        check_cuda_build()
    argv = list(settings)
    if config is not None:
        argv[:0] = ["--config", config]
    run_config = load_run_config(argv)
    world, hardware = World.of(run_config, ranks, ranks_per_node), load_hardware(device)
    if trace:
        _trace(run_config, world, document_tokens, capability, hardware, json=json)
    elif search:
        held = {key_of_flag(argument) for argument in settings if argument.startswith("--")}
        _search(run_config, world, document_tokens, hardware, held, output, json=json)
    else:
        return _estimate(run_config, world, document_tokens, hardware, json=json)
    return DONE


def _estimate(run_config: RunConfig, world: World, document_tokens: int, hardware: Hardware, *, json: bool) -> int:
    """Print the plan; return the exit code, which says whether the run fits."""
    from launcher.plan.estimate import estimate_run

    run = estimate_run(run_config, world, hardware, document_tokens=document_tokens)
    longest = _longest(run, run_config)
    if json:
        say_json(run.to_json() | {"longest_row_tokens": longest})
    else:
        _say_estimate(run, longest)
    return DONE if run.fits else FAILED


def _longest(run: RunEstimate, asked: RunConfig) -> int:
    from launcher.config.kept import chunk_choices
    from launcher.plan.estimate import longest_row

    config = run.config
    if asked.train.chunk_tokens == "auto":
        # The candidate for the longest rows.
        config = chunk_choices(config)[-1]
    return longest_row(config, run.world, run.hardware)


def _longer(run: RunEstimate, longest: int) -> Candidate | None:
    """Return settings for the next power of two that does not fit, in units of the run's own rows."""
    from launcher.plan.search import fit_rows

    seq_len = run.config.data.seq_len
    while seq_len <= longest:
        seq_len *= 2
    return fit_rows(run.config, run.world, run.hardware, seq_len, document_tokens=run.document_tokens)


def _say_estimate(run: RunEstimate, longest: int) -> None:
    from launcher.plan.screen import headline, memory_rows, seconds_rows, summary

    say(headline(run))
    for headings, rows in (memory_rows(run), seconds_rows(run)):
        say(f"\n{table(headings, rows)}")
    say("\n" + "\n".join(summary(run, longest, _longer(run, longest))))


def _search(
    run_config: RunConfig,
    world: World,
    document_tokens: int,
    hardware: Hardware,
    held: set[str],
    output: Path | None,
    *,
    json: bool,
) -> None:
    from launcher.plan.estimate import estimate_run
    from launcher.plan.screen import count_line, flags, front_rows, nearest_lines
    from launcher.plan.search import nearest, search

    with progress("trying settings", rate=lambda rate: f"{rate:,.0f} a second") as update:
        found = search(run_config, world, hardware, document_tokens=document_tokens, held=held, progress=update)
    if found.fastest is None:
        near = nearest(found.leanest, world, document_tokens=document_tokens, held=held)
        raise ConfigError("\n".join([count_line(found, hardware), *nearest_lines(found.leanest, near, world)]))
    run = estimate_run(found.fastest.config, world, hardware, document_tokens=document_tokens)
    longest = _longest(run, run.config)
    if output is not None:
        output.write_text(found.fastest.config.to_toml())
    if json:
        say_json(found.to_json() | {"fastest": run.to_json() | {"longest_row_tokens": longest}})
        return
    say(count_line(found, hardware) + "\n")
    say(table(*front_rows(found)) + "\n")
    _say_estimate(run, longest)
    if output is None:
        say(f"\nThese settings as flags (--output F.toml writes the whole config):\n{flags(found.fastest.settings)}")
    else:
        say(f"\nWritten to {output}: start it with --config {output}.")


def _trace(
    run_config: RunConfig, world: World, document_tokens: int, capability: str, hardware: Hardware, *, json: bool
) -> None:
    from launcher.plan.estimate import estimate_run
    from launcher.trace.report import heading, link_rows, memory_rows, remarks
    from launcher.trace.trace import trace_run

    planned = estimate_run(run_config, world, hardware, document_tokens=document_tokens)
    traced = trace_run(
        run_config,
        world,
        document_tokens=document_tokens,
        capability=_capability(capability),
        hardware=hardware,
        progress=lambda kind: note(f"tracing {kind.describe()} …"),
    )
    if json:
        say_json(traced.to_json() | {"planned": planned.to_json()["ranks"]})
        return
    say(heading(traced))
    for headings, rows in (memory_rows(traced, planned), link_rows(traced)):
        if rows:
            say(f"\n{table(headings, rows)}")
    say("\n" + "\n".join(remarks(traced)))


def _capability(text: str) -> tuple[int, int]:
    """Parse "9.0" into (9, 0)."""
    major, dot, minor = text.partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise ConfigError(f"--capability {text!r} is not one. Write 8.0 (A100), 9.0 (H100) or 10.0 (B200).")
    return int(major), int(minor)

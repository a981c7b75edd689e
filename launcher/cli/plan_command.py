"""The verb ``plan``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import arg

from launcher.cli.cli_output import Json, note, print_json, print_line, progress, table
from launcher.cluster.exit import DONE, FAILED
from longctx.errors import ConfigError

if TYPE_CHECKING:
    from launcher.config.config_sections import RunConfig
    from launcher.plan.estimate import RunEstimate
    from launcher.plan.hardware import Hardware
    from launcher.plan.plan_search import SettingsCandidate
    from launcher.plan.planned_world import World


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
    """Report a run's needs before it starts: bytes per device, seconds per step, hours for the run.

    Takes the config and flags of `train`, reads no data and starts no ranks. Bytes are arithmetic; seconds come from
    the rates in a hardware profile. The exit code is 1 if the run does not fit. --search tries degrees, ZeRO, offload,
    activations to keep and their place, and chunks. It finds the fastest settings that fit. Settings given as flags
    stay fixed. --output writes the config. --trace checks the plan: it runs forward, backward and the optimizer for
    each kind of rank on tensors without data, and records the code's own memory, links and host waits, in seconds to
    minutes. It needs PyTorch's CUDA build, no GPU.

    Args:
        trace: Trace one step for each kind of rank instead of using arithmetic.
        search: Search for settings instead of using the config's.
        output: With --search, the file to write.
        overwrite: Replace that file if it exists.
        config: The run's file, or a recipe name.
        ranks: Ranks in the run; default: those in run.hostfile if it names a file, otherwise the fewest that the
            degrees allow.
        ranks_per_node: Ranks per machine; default: those in the hostfile, otherwise 8.
        document_tokens: Length of the documents packed into rows; 0 means one document per row. Images have their own.
        capability: With --trace, the compute capability for which kernels are chosen.
        device: Hardware to plan for: h100, h200, b200, cpu (an assumed core), measured (written by `measure` into the
            working folder), or a file like those profiles.
    """
    for name, value in (("ranks", ranks), ("ranks-per-node", ranks_per_node), ("document-tokens", document_tokens)):
        if value < 0:
            raise ConfigError(f"--{name} {value} must be at least 1, or 0 for the default.")
    if output is not None and not search:
        raise ConfigError("--output names the file for --search. Add --search, or leave it out.")
    if search and trace:
        raise ConfigError(
            "--search estimates many settings, --trace traces one. Use --trace on a setting that --search found."
        )
    if output is not None and output.exists() and not overwrite:
        raise ConfigError(f"--output {output} exists. Name another file, or replace it with --overwrite.")
    from launcher.config.flags import key_of_flag
    from launcher.config.load_config import load_run_config
    from launcher.plan.hardware import load_hardware
    from launcher.plan.planned_world import World

    # Fail first: without the CUDA build there are no kernels to trace.
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
        # The search varies only settings that the user did not set by a flag.
        held = {key_of_flag(argument) for argument in settings if argument.startswith("--")}
        _search(run_config, world, document_tokens, hardware, held, output, json=json)
    else:
        return _estimate(run_config, world, document_tokens, hardware, json=json)
    return DONE


def _estimate(run_config: RunConfig, world: World, document_tokens: int, hardware: Hardware, *, json: bool) -> int:
    """Print the plan; return the exit code, which is 1 if the run does not fit."""
    from launcher.plan.estimate import estimate_run

    run = estimate_run(run_config, world, hardware, document_tokens=document_tokens)
    longest = _longest(run, run_config)
    if json:
        print_json(run.to_json() | {"longest_row_tokens": longest})
    else:
        _say_estimate(run, longest)
    return DONE if run.fits else FAILED


def _longest(run: RunEstimate, requested: RunConfig) -> int:
    from launcher.config.saved_activation_rules import chunk_choices
    from launcher.plan.estimate import max_row_tokens

    config = run.config
    if requested.train.chunk_tokens == "auto":
        # The last choice allows the longest rows.
        config = chunk_choices(config)[-1]
    return max_row_tokens(config, run.world, run.hardware)


def _longer(run: RunEstimate, longest: int) -> SettingsCandidate | None:
    """Return settings that fit the shortest doubling of the run's row length that does not fit yet."""
    from launcher.plan.plan_search import fit_rows

    seq_len = run.config.data.seq_len
    while seq_len <= longest:
        seq_len *= 2
    return fit_rows(run.config, run.world, run.hardware, seq_len, document_tokens=run.document_tokens)


def _say_estimate(run: RunEstimate, longest: int) -> None:
    from launcher.plan.screen import headline, plan_memory_rows, plan_summary, seconds_rows

    print_line(headline(run))
    for column_names, rows in (plan_memory_rows(run), seconds_rows(run)):
        print_line(f"\n{table(column_names, rows)}")
    print_line("\n" + "\n".join(plan_summary(run, longest, _longer(run, longest))))


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
    from launcher.plan.plan_search import nearest_alternatives, search_settings
    from launcher.plan.screen import count_line, flags, front_rows, nearest_lines

    with progress("trying settings", rate=lambda rate: f"{rate:,.0f} a second") as update:
        found = search_settings(
            run_config, world, hardware, document_tokens=document_tokens, held=held, progress=update
        )
    if found.fastest is None:
        # Even the leanest settings do not fit: suggest shorter rows or more ranks.
        near = nearest_alternatives(found.leanest, world, document_tokens=document_tokens, held=held)
        raise ConfigError("\n".join([count_line(found, hardware), *nearest_lines(found.leanest, near, world)]))
    run = estimate_run(found.fastest.config, world, hardware, document_tokens=document_tokens)
    longest = _longest(run, run.config)
    if output is not None:
        output.write_text(found.fastest.config.to_toml())
    if json:
        print_json(found.to_json() | {"fastest": run.to_json() | {"longest_row_tokens": longest}})
        return
    print_line(count_line(found, hardware) + "\n")
    print_line(table(*front_rows(found)) + "\n")
    _say_estimate(run, longest)
    if output is None:
        print_line(
            f"\nThese settings as flags (--output F.toml writes the full config):\n{flags(found.fastest.settings)}"
        )
    else:
        print_line(f"\nWritten to {output}: start it with --config {output}.")


def _trace(
    run_config: RunConfig, world: World, document_tokens: int, capability: str, hardware: Hardware, *, json: bool
) -> None:
    from launcher.plan.estimate import estimate_run
    from launcher.trace.trace import trace_run
    from launcher.trace.trace_report import link_rows, trace_header, trace_memory_rows, trace_notes

    # Shown next to the traced bytes, which test the arithmetic.
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
        print_json(traced.to_json() | {"planned": planned.to_json()["ranks"]})
        return
    print_line(trace_header(traced))
    for column_names, rows in (trace_memory_rows(traced, planned), link_rows(traced)):
        if rows:
            print_line(f"\n{table(column_names, rows)}")
    print_line("\n" + "\n".join(trace_notes(traced)))


def _capability(text: str) -> tuple[int, int]:
    """Parse "9.0" into (9, 0)."""
    major, dot, minor = text.partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise ConfigError(
            f"--capability {text!r} is not a compute capability. Try 8.0 (A100), 9.0 (H100) or 10.0 (B200)."
        )
    return int(major), int(minor)

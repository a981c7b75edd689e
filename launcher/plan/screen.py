"""Text for planned runs and searches, one screen each."""

from __future__ import annotations

import dataclasses
from typing import Any

from launcher.config.config_sections import RunConfig
from launcher.config.resolved import ResolvedConfig
from launcher.config.tokens_per_rank_rules import padded_tokens
from launcher.plan.estimate import HEADROOM, RunEstimate
from launcher.plan.hardware import Hardware
from launcher.plan.memory_estimate import gib
from launcher.plan.plan_search import Nearest, SearchResult, SettingsCandidate
from launcher.plan.planned_world import World
from launcher.plan.workspace import expected_kernel
from launcher.wording import format_count

_PARTS = {
    "products": "weight matmuls",
    "attention": "attention",
    "elementwise": "norms, activations, loss",
    "hops": "waiting for KV blocks",
    "all_to_alls": "all-to-alls for heads and experts",
    "moves": "waiting for stored activations",
    "zero": "waiting for gradients and weights",
    "optimizer": "optimizer",
    "host": "operator calls, bookkeeping",
}
_MOST_ROWS = 10
"""Limit on search rows shown."""
Rows = tuple[list[str], list[list[str]]]
"""Headings and rows in a table."""


def describe_run(config: ResolvedConfig, world: World, document_tokens: int) -> str:
    """Describe ranks and settings on one line, and a micro-batch on the next."""
    parallel, tokens = config.parallel, padded_tokens(config, config.data.seq_len * config.train.micro_batch_rows)
    documents, image_tokens = "one document per row", config.model.image.num_tokens
    if document_tokens:
        documents = f"documents of {document_tokens:,} tokens"
    if config.model.image.is_used:
        documents = f"{format_count(config.data.seq_len // image_tokens, 'image')} of {image_tokens:,} tokens per row"
    return (
        f"{format_count(world.ranks, 'rank')} ({world.ranks_per_node} per machine): {describe_settings(config)}, "
        f"{config.train.dtype}, layout {parallel.layout}\n{tokens:,} tokens per micro-batch, "
        f"{tokens // parallel.context:,} per rank, {documents}"
    )


def describe_settings(config: RunConfig) -> str:
    """Describe the searched settings in a few words, omitting those that are off."""
    train, parallel, zero = config.train, config.parallel, config.zero
    parts = [f"context {parallel.context}"]
    if parallel.tokens_per_rank:
        parts = [f"{parallel.tokens_per_rank:,} tokens per rank"]
    parts += [f"{name} {getattr(parallel, name)}" for name in ("ulysses", "expert") if getattr(parallel, name) > 1]
    if train.micro_batch_rows > 1:
        parts.append(f"{train.micro_batch_rows} rows at once")
    parts.append(f"ZeRO {zero.stage}")
    parts += [
        f"{label} on {where}"
        for label, where in (("optimizer", zero.offload), ("weights", zero.offload_parameters))
        if where != "none"
    ]
    parts.append(f"keep {train.keep} on {train.store}")
    if train.chunk_tokens:
        parts.append(f"chunks of {train.chunk_tokens:,}, {format_count(train.head_groups, 'head group')}")
    return ", ".join(parts)


def flags(settings: dict[str, Any]) -> str:
    """Format settings as flags for pretrain."""
    return " ".join(f"--{key} {value}" for key, value in settings.items())


# --------------------------------------------------------------------------------------------------------------- a plan


def headline(run: RunEstimate) -> str:
    """Describe the run and the hardware, and whether the run fits."""
    has, needs = gib(run.hardware.memory_bytes), gib(run.peak_bytes)
    message = f"It fits: {needs} of {has} at the peak."
    if run.peak_bytes > run.hardware.memory_bytes:
        message = f"It does not fit: {needs} at the peak, and a device has {has}."
    elif not run.fits:
        message = (
            f"It does not fit: {gib(run.host_bytes)} per rank on the host, and each rank has "
            f"{gib(run.hardware.host_memory_bytes)}."
        )
    description = describe_run(run.config, run.world, run.document_tokens)
    return f"{description}\non {run.hardware.name}. {message}"


def plan_memory_rows(run: RunEstimate) -> Rows:
    """Return table rows with device bytes by kind."""
    # All ranks must fit, so show the one with the highest peak.
    b = max((rank.bytes for rank in run.ranks), key=lambda of_rank: of_rank.peak)
    rows = []
    if b.process:
        rows.append(["the program", gib(b.process), "always"])
    rows += [
        ["weights", gib(b.weights + b.gathered), "always; with stage 3, includes gathered weights"],
        ["gradients", gib(b.gradients + b.reduction), "always; includes reduction buffers"],
        ["optimizer", gib(b.optimizer), "always"],
        ["kept", gib(b.kept), "from forward to backward"],
        ["passing", gib(b.passing), "at the peak, in backward or in the loss"],
        ["peak", gib(b.peak), ""],
    ]
    if run.host_bytes:
        rows.append(["on the host", gib(run.host_bytes), "per rank: offloaded or stored there"])
    if run.copy_bytes:
        why = "extra host memory while a checkpoint is written; without it, training waits"
        rows.append(["checkpoint copy", gib(run.copy_bytes), why])
    if run.config.train.store == "disk":
        rows.append(["on the disk", gib(b.kept_on_disk), "per rank"])
    return ["memory per rank", "", "when"], rows


def seconds_rows(run: RunEstimate) -> Rows:
    """Return table rows with a step's seconds by part, for the slowest rank."""
    of_parts = dataclasses.asdict(run.seconds)
    total = run.seconds.total
    rows = [
        [_PARTS[name], f"{seconds:,.3g} s", f"{seconds / total:.0%}"] for name, seconds in of_parts.items() if seconds
    ]
    return ["time per step", "", ""], [*rows, ["total", f"{total:,.3g} s", ""]]


def plan_summary(run: RunEstimate, longest: int, longer: SettingsCandidate | None) -> list[str]:
    """Summarize the full run, and settings for longer rows.

    ``longest`` is the longest row, in tokens, that fits with these settings; ``longer`` holds settings for longer rows,
    or for the run's own rows if they do not fit.
    """
    config, world = run.config, run.world
    hours = run.run_hours
    lines = [
        f"{run.tokens_per_second:,.0f} tokens per second, {run.tokens_per_second / world.ranks:,.0f} per device; "
        f"{format_count(config.train.steps, 'step')} take {_hours(hours)} hours, {_hours(hours * world.ranks)} "
        "device-hours."
    ]
    if run.images_per_step:
        rate = run.images_per_step / run.seconds.total
        lines.append(f"{format_count(run.images_per_step, 'image')} per step, {rate:,.4g} per second.")
    masked_mfu, full = run.utilisation(run.model_flops), run.utilisation(run.full_flops)
    if masked_mfu is not None and full is not None:
        lines.append(
            f"MFU {masked_mfu:.1%} with causal attention counted as masked, {full:.1%} with all pairs counted."
        )
    if longest:
        lines.append(f"The longest row that fits with these settings has {longest:,} tokens.")
    else:
        lines.append("No row fits with these settings.")
    if longer is not None:
        lines.append(
            f"Rows of {longer.config.data.seq_len:,} tokens fit with: {describe_settings(longer.config)} "
            f"({gib(longer.peak_bytes)}, {longer.seconds:,.4g} s per step of {longer.config.train.tokens_per_step:,} "
            "tokens)."
        )
    else:
        lines.append("No settings fit longer rows on these ranks (--search tries them all).")
    return [*lines, "", _OF_BYTES, *_of_seconds(run)]


def _of_seconds(run: RunEstimate) -> list[str]:
    """Explain the seconds' source and reliability."""
    hardware, ranks = run.hardware, run.world.ranks_per_node
    if not hardware.ranks and hardware.device_type == "cpu":
        return ["Seconds assume a generic core. `longctx measure` measures this machine's, for --device measured."]
    if not hardware.ranks:
        kernel = expected_kernel(run.config, hardware.device_type)
        return [_OF_SECONDS, f"Attention uses the {kernel} kernel; --parallel.kernel selects another."]
    lines = ["Seconds use rates from `longctx measure` (--json lists each rate with its source)."]
    if hardware.ranks != ranks:
        lines.append(
            f"The rates were measured with {format_count(int(hardware.ranks), 'rank')} at once, and this run has "
            f"{ranks} per machine, sharing cores, memory and links: run `longctx measure --ranks {ranks}`."
        )
    return lines


def _hours(hours: float) -> str:
    if hours >= 10:
        return f"{hours:,.0f}"
    return f"{hours:.2g}"


_OF_BYTES = (
    "Bytes are computed as the trace counts them (`plan --trace`), including attention's backward workspace; NCCL "
    "buffers, other kernels' workspaces and allocator fragmentation are extra."
)
_OF_SECONDS = (
    "Seconds use the profile's rates, each with its source (--json). This project has not measured a GPU yet: expect "
    "the order of magnitude only."
)


# ------------------------------------------------------------------------------------------------------------- a search


def count_line(found: SearchResult, hardware: Hardware) -> str:
    """Report how many settings were tried."""
    return (
        f"{found.num_candidates:,} settings tried, {found.num_fitting:,} fit {hardware.name} with {HEADROOM:.0%} of "
        f"its memory left, and {gib(hardware.host_memory_bytes)} of host memory per rank."
    )


def front_rows(found: SearchResult) -> Rows:
    """Return table rows with time against memory; an arrow marks the selected candidate."""
    # Thin out the front evenly, but always show the fastest candidate.
    step = max(1, -(-len(found.front) // _MOST_ROWS))
    candidates = found.front[::step]
    if found.fastest is not None and found.fastest not in candidates:
        candidates.append(found.fastest)
    rows = []
    for one in candidates:
        mark = "->" if one is found.fastest else ""
        rows.append(
            [mark, f"{one.seconds:,.4g} s", gib(one.peak_bytes), gib(one.host_bytes), describe_settings(one.config)]
        )
    return ["", "a step", "device", "host", "settings"], rows


def nearest_lines(leanest: SettingsCandidate, near: Nearest, world: World) -> list[str]:
    """Suggest changes if no settings fit."""
    hardware = leanest.hardware
    lines = [
        f"No settings fit {format_count(world.ranks, 'rank')}. The nearest: {describe_settings(leanest.config)}.",
        f"They need {gib(leanest.peak_bytes)} on a device with {gib(hardware.memory_bytes * (1 - HEADROOM))}, and "
        f"{gib(leanest.host_bytes)} on the host with {gib(hardware.host_memory_bytes)}.",
    ]
    if near.seq_len:
        lines.append(f"With them, rows of {near.seq_len:,} tokens fit: --data.seq_len {near.seq_len}.")
    if near.world is not None and near.candidate is not None:
        lines.append(
            f"Rows of {leanest.config.data.seq_len:,} tokens fit {near.world.ranks} ranks: "
            f"{describe_settings(near.candidate.config)}, {near.candidate.seconds:,.3g} s per step."
        )
    if not leanest.config.train.store_path:
        lines.append("A disk has more room: name a folder on a fast one with --train.store_path.")
    return lines

"""Description of a run before anything is built: summary lines, and warnings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from data_pipeline.mixture.mixed_order import MixtureEstimate
from data_pipeline.rows.epoch_blocks import PackReport
from launcher.config.model_section import describe_change, model_changes
from launcher.config.resolved import ResolvedConfig
from launcher.plan.memory_estimate import Memory, gib, memory_by_stage
from launcher.plan.parameters import num_trained_of_all
from launcher.training.learning_rate_schedule import learning_rate
from launcher.training.run_origin import RunOrigin
from launcher.wording import format_count, short_duration
from longctx.architecture.size import count_parameters
from longctx.config import ModelConfig
from longctx.conversion.tensor_layouts import quantized_layouts
from parallel.mesh import Mesh
from parallel.schedule.degrees import Degrees
from parallel.transport.transport_choice import resolve_transport


@dataclass(frozen=True, kw_only=True)
class Start:
    """Values that describe a run before its first step."""

    config: ResolvedConfig
    model: ModelConfig
    mesh: Mesh
    device: str
    """Name of the ranks' device."""
    origin: RunOrigin
    memory: Memory
    free_bytes: int
    """Free memory: on one GPU, or on the CPU for all ranks on the machine."""
    free_disk_bytes: int
    packing: PackReport
    """Rows per epoch and their padding: counted, or estimated from its first epoch block."""
    source_estimate: MixtureEstimate | None = None
    """Tokens taken from each source in a mixture; None for one folder."""
    degrees: list[Degrees] = field(default_factory=list)
    """Rank placement for the first step's micro-batches; empty if the degree is fixed."""

    @property
    def num_steps(self) -> int:
        """Steps that this process takes."""
        return max(0, self.config.last_step - self.origin.step)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes per checkpoint: a float32 master and two moments for each parameter."""
        return 12 * sum(count_parameters(self.model).values())

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints that this process writes."""
        if not self.num_steps:
            return 0
        every, last = self.config.checkpoint.every_steps, self.config.last_step
        if not every:
            return 1
        # The last step is always saved.
        return last // every - self.origin.step // every + bool(last % every)


def header(start: Start) -> list[str]:
    """Return a run's first lines: its model, the model's origin, and its ranks."""
    lines = [_model(start)]
    lines += _origin(start)
    lines.append(_ranks(start))
    return lines


def details(start: Start) -> list[str]:
    """Return further lines for a run's log: memory by ZeRO stage, steps, data, checkpoints."""
    lines = _side_by_side(start)
    lines.append(_memory(start))
    lines += _stages(start)
    lines += (_steps(start), _data(start), _checkpoints(start))
    return lines


def outlook(start: Start, peak_bytes: int, step_seconds: float | None) -> str:
    """Return one line about the coming steps; ``peak_bytes`` is per rank, ``step_seconds`` None if unknown."""
    line = f"Plan: {format_count(start.num_steps, 'step')} of {start.config.train.tokens_per_step:,} tokens"
    # A mixture's sources differ in their number of passes.
    if start.source_estimate is None:
        passes = start.num_steps * start.config.rows_per_step / start.packing.rows
        line += f", {passes:.2f} passes over the data"
    if step_seconds is not None:
        line += f"; {step_seconds:.3g} s per step, {short_duration(step_seconds * start.num_steps)} in all"
    return f"{line}; {gib(peak_bytes)} per rank at the peak."


def _model(start: Start) -> str:
    model = start.model
    counts = count_parameters(model)
    line = f"Model: {_short(sum(counts.values()))} parameters"
    if model.num_experts:
        line += f", {_short(sum(count_parameters(model, active=True).values()))} active per token"
    line += f"; {format_count(model.num_layers, 'layer')} of width {model.hidden_size:,}"
    line += f"{_experts(start)}."
    if model.adapter.is_used:
        trained = num_trained_of_all(start.config)
        line += f" Trained: {_short(trained)} in adapters of rank {model.adapter.rank}; all others are frozen"
        if model.adapter.is_quantized:
            layouts = quantized_layouts(model).values()
            values, stored = sum(x.numel for x in layouts), sum(x.num_bytes for x in layouts)
            line += f", {_short(values)} of them in {model.adapter.quantize_base} ({8 * stored / values:.4g} bits each)"
        line += "."
    return line


def _experts(start: Start) -> str:
    model, parallel = start.model, start.config.parallel
    if not model.num_experts:
        return ""
    line = f"; {model.num_experts} experts per layer, {model.experts_per_token} per token"
    if model.shared_ffn_size:
        line += ", one shared"
    if parallel.expert > 1:
        line += f", {model.num_experts // parallel.expert} per rank"
    if start.config.parallel.expert_tile_tokens:
        line += f", {start.config.parallel.expert_tile_tokens} tokens at a time"
    if model.capacity_factor:
        line += f", capacity {model.capacity_factor:g}"
    return line


def _origin(start: Start) -> list[str]:
    """Describe the run's origin, and all changes to its model's fields."""
    origin = start.origin
    if origin.folder is None or origin.model is None:
        return []
    verb = {"resumed": "Resumes", "started": "Starts"}[origin.kind]
    lines = [f"{verb} from {origin.folder}, with its model."]
    changes = model_changes(origin.model, start.model)
    if changes:
        lines = [f"{verb} from {origin.folder}, with model changes:"]
    lines.extend(f"  {describe_change(name, before, now)}" for name, (before, now) in changes.items())
    return lines


def _ranks(start: Start) -> str:
    config, mesh = start.config, start.mesh
    rows = config.parallel.layout
    if mesh.context > 1:
        rows += f" rows by {resolve_transport(config.parallel.transport, mesh)}"
    where = f"{mesh.describe()} on {start.device}"
    return f"Ranks: {where}, {rows}, ZeRO {config.zero.stage}, {config.train.dtype}."


def _side_by_side(start: Start) -> list[str]:
    """Describe the effect of ``parallel.tokens_per_rank``: rows at once, documents' degrees, attention imbalance."""
    if not start.degrees:
        return []
    config, mesh = start.config, start.mesh
    sizes = config.micro_batches(mesh.world_size).sizes
    rows = f"{sizes[0]}"
    if sizes[-1] != sizes[0]:
        rows = f"{sizes[-1]} or {sizes[0]}"
    ranks = [n for of_batch in start.degrees for n in of_batch.ranks]
    minimum = [n for of_batch in start.degrees for n in of_batch.min_ranks]
    worst = max(of_batch.imbalance for of_batch in start.degrees)
    return [
        f"Side by side: {format_count(mesh.context, 'rank')} with up to {config.parallel.tokens_per_rank:,} tokens "
        f"share {rows} rows at once. In the first step a document spans {min(ranks)} to {max(ranks)} ranks, "
        f"{sum(ranks) / len(ranks):.2f} in the mean ({sum(minimum) / len(minimum):.2f} is the minimum); the busiest "
        f"rank has {worst:.3f} times the mean attention."
    ]


def _memory(start: Start) -> str:
    # On a CPU, the machine's ranks share its free memory.
    need, ranks_text = start.memory, format_count(start.mesh.ranks_per_node, "rank")
    if start.device != "cpu":
        ranks_text = "each"
    parts = ", ".join(
        f"{name} {gib(getattr(need, name))}" for name in ("weights", "gradients", "optimizer", "activations")
    )
    return (
        f"Memory: at least {gib(need.training)} per rank ({parts}); {gib(start.free_bytes)} are free for {ranks_text}."
    )


def _stages(start: Start) -> list[str]:
    lines = []
    for stage, need in memory_by_stage(start.config, start.model, start.mesh.world_size).items():
        parts = ", ".join(
            f"{name} {gib(getattr(need, name))}" for name in ("weights", "gradients", "masters", "moments")
        )
        chosen = ""
        if stage == start.config.zero.stage:
            chosen = ", this run"
        offloaded = ""
        if need.host:
            offloaded = f", {gib(need.host)} offloaded"
        if need.disk:
            offloaded = f", {gib(need.disk)} on a disk"
            if need.host:
                offloaded += f" and {gib(need.host)} in host memory, buffers included"
        lines.append(f"ZeRO {stage}{chosen}: {gib(need.state)} per rank ({parts}){offloaded}.")
    return lines


def _steps(start: Start) -> str:
    config, train = start.config, start.config.train
    each = f"{format_count(config.rows_per_step, 'row')} of {config.data.seq_len:,} tokens"
    # plural only appends an s.
    micro_batches = format_count(config.accumulation(start.mesh.world_size), "micro-batch").replace("batchs", "batches")
    rate = f"rate {train.lr:g}"
    if train.warmup_steps:
        rate += f" after {format_count(train.warmup_steps, 'step')}"
    if train.schedule == "inverse_sqrt":
        rate += f", then inverse square root down to {learning_rate(train.steps, train):.3g}"
    elif train.final_lr_ratio != 1:
        rate += f", then down to {train.lr * train.final_lr_ratio:g}"
    steps = f"Steps: {format_count(start.num_steps, 'step')} of {train.tokens_per_step:,} tokens"
    return f"{steps} = {each}, in {micro_batches} per rank; {rate}."


def _data(start: Start) -> str:
    packing, rows = start.packing, start.num_steps * start.config.rows_per_step
    if start.source_estimate is not None:
        return f"Data: {_short(rows * start.config.data.seq_len)} tokens in all: {_sources(start.source_estimate)}."
    approx = sample = ""
    if not packing.exact:
        approx, sample = "about ", f", estimated from its first {format_count(packing.planned_documents, 'document')}"
    left_out = ""
    if packing.pairs_left_out is not None:
        left_out = f", pairs dropped because a side exceeds a row: {approx}{packing.pairs_left_out:,}"
    elif packing.truncated_tokens:
        left_out = f", {approx}{_short(packing.truncated_tokens)} remainder tokens dropped"
    return (
        f"Data: {_short(rows * start.config.data.seq_len)} tokens in all, {approx}{rows / packing.rows:.2f} "
        "passes over "
        f"{approx}{format_count(packing.rows, 'row')} with {approx}{100 * packing.padding_share:.2f} % padding"
        f"{left_out}{sample}."
    )


def _sources(source_estimate: MixtureEstimate) -> str:
    return ", ".join(
        f"{source.name} {_short(round(source.tokens))} ({source.epochs:.2f} passes)"
        for source in source_estimate.sources
    )


def _checkpoints(start: Start) -> str:
    line = f"Checkpoints: {start.num_checkpoints} to come, {gib(start.checkpoint_bytes)} each"
    if start.config.checkpoint.keep_last:
        line += f"; the newest {start.config.checkpoint.keep_last} stay"
    return f"{line}; {gib(start.free_disk_bytes)} of disk are free."


def _short(count: int) -> str:
    """Format a count in thousands, millions or billions, like model sizes."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return str(count)


# ---------------------------------------------------------------------------------------------------------- warnings


def warnings(start: Start) -> list[str]:
    """Return warnings about likely mistakes in the settings, one line each."""
    found = [
        _tight_memory(start),
        _long_rows(start),
        _constant_gates(start),
        _all_warm_up(start),
        _repeated_rows(start),
        _used_up(start),
        _full_disk(start),
        _changed(start),
    ]
    return [line for line in found if line]


_PEAK = 2
"""Peak bytes for weights, gradients and optimizer, relative to those held between steps: 1.3 to 2 measured on CPUs, by
stage and dtype, with 68 million parameters on one rank. Starting and stepping copy parts of them."""


def _tight_memory(start: Start) -> str:
    need, ranks = start.memory, start.mesh.ranks_per_node
    peak = ranks * (_PEAK * (need.training - need.activations) + need.activations)
    # The factor was only measured on CPUs.
    if start.device != "cpu" or peak <= start.free_bytes:
        return ""
    return (
        f"Memory is tight: while starting and stepping, DeepSpeed has used up to {_PEAK} times its memory between "
        f"steps, which is {gib(peak)} for this machine's {format_count(ranks, 'rank')}, and {gib(start.free_bytes)} "
        "are free."
    )


def _constant_gates(start: Start) -> str:
    # A constant gate passes no gradient to its router.
    if not start.model.has_constant_gates:
        return ""
    return (
        "model.experts_per_token=1 with model.normalize_gates=true makes every gate 1: the routers learn from "
        "model.balance_loss_weight and model.router_z_loss_weight alone."
    )


def _long_rows(start: Start) -> str:
    seq_len, most = start.config.data.seq_len, start.model.max_positions
    # A row of images holds several, and none is longer than the table.
    if seq_len <= most or start.model.image.is_used:
        return ""
    return (
        f"data.seq_len={seq_len} exceeds model.max_positions={most}: documents reach positions beyond the model's "
        f"limit. Scale model.rope and set model.max_positions={seq_len}, or shorten the rows."
    )


def _all_warm_up(start: Start) -> str:
    train = start.config.train
    if train.warmup_steps < train.steps:
        return ""
    return (
        f"train.warmup_steps={train.warmup_steps} is not below train.steps={train.steps}: the rate ends at "
        f"{train.lr * min(1.0, train.steps / train.warmup_steps):g}, still in its warm-up."
    )


def _repeated_rows(start: Start) -> str:
    rows = start.config.rows_per_step
    if rows <= start.packing.rows:
        return ""
    approx = ""
    if not start.packing.exact:
        approx = "about "
    return (
        f"A step takes {format_count(rows, 'row')} and the data has {approx}{start.packing.rows:,}: rows "
        "repeat within a "
        "step. Lower train.tokens_per_step, or build more data."
    )


def _used_up(start: Start) -> str:
    if start.source_estimate is None or start.source_estimate.missing_tokens < 1:
        return ""
    return (
        f"The mixture ends about {_short(round(start.source_estimate.missing_tokens))} tokens before the run does: "
        "every source has a maximum number of epochs. The run will stop there with an error; raise epochs, or lower "
        "train.steps."
    )


def _full_disk(start: Start) -> str:
    # A new checkpoint is written before an old one is removed.
    most = start.num_checkpoints
    if start.config.checkpoint.keep_last:
        most = min(most, start.config.checkpoint.keep_last + 1)
    needed = most * start.checkpoint_bytes
    if needed <= start.free_disk_bytes:
        return ""
    return (
        f"{format_count(most, 'checkpoint')} take {gib(needed)}, and {gib(start.free_disk_bytes)} of disk are "
        "free: lower "
        "checkpoint.keep_last, or write to another disk."
    )


def _changed(start: Start) -> str:
    if start.origin.settings is None:
        return ""
    changes = changed_settings(start.origin.settings, start.config)
    if not changes:
        return ""
    changes_text = ", ".join(describe_change(name, before, now) for name, (before, now) in changes.items())
    message = f"This run resumes with changed settings: {changes_text}. The schedule follows the new values."
    if "train.tokens_per_step" in changes:
        message += f" {_changed_tokens(start, *changes['train.tokens_per_step'])}"
    return message


def _changed_tokens(start: Start, before: int, now: int) -> str:
    """Describe the effect of changed tokens per step on a schedule that counts steps."""
    train, step = start.config.train, start.origin.step
    tokens = step * before + (train.steps - step) * now
    # The run's original tokens, in steps with the new size.
    equal = step + (train.steps - step) * before / now
    return (
        f"It counts steps, not tokens: {train.steps:,} steps will have seen {_short(tokens)} tokens instead of "
        f"{_short(train.steps * before)}; train.steps={round(equal)} keeps the tokens."
    )


_TRAINING_SECTIONS = ("data", "train", "parallel", "zero")
_FREE = (
    *("data.train", "data.validation", "data.cache", "zero.nvme_path"),
    *("train.stop_after", "train.record_routing", "train.replay_routing"),
)
"""Keys that may change without affecting training: file locations, and the last step in this process."""


def changed_settings(before: Mapping[str, Any], config: ResolvedConfig) -> dict[str, tuple[Any, Any]]:
    """Return a resumed run's keys that differ from its checkpoint: name -> (before, now)."""
    now = dataclasses.asdict(config)
    changes: dict[str, tuple[Any, Any]] = {}
    for section in _TRAINING_SECTIONS:
        for key, value in now[section].items():
            name = f"{section}.{key}"
            # A key missing in the checkpoint's release is not a change.
            was = before.get(section, {}).get(key, value)
            # "auto" depends on the machine, and may resolve to the same value.
            if was != value and name not in _FREE and "auto" not in (was, value):
                changes[name] = was, value
    return changes

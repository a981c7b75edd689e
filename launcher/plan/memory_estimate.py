"""Minimum memory for a run, by arithmetic, compared with the machine's free memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from launcher.config.resolved import ResolvedConfig
from launcher.config.zero_section import zero_options
from launcher.plan.encoder import encoder_run
from launcher.plan.muon_cost import num_orthogonal
from launcher.plan.parameters import build_shapes, num_trained, num_trained_of_all, quantization_savings
from launcher.plan.planned_world import World
from launcher.plan.stages import stage_runs
from launcher.wording import format_count
from longctx.architecture.model_rules import GATED
from longctx.architecture.size import count_parameters
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.kernels.memory import available_bytes
from longctx.model.experts.experts import is_expert_weight
from parallel.zero.zero_options import update_size

log = logging.getLogger(__name__)

GIB = 2**30
FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Minimum bytes for one rank. Buffers for kernels and collectives, and the program itself, come on top."""

    weights: int
    gradients: int
    """Float32 gradients, and those collected before reduction."""
    masters: int
    """Float32 weight copies; 0 if a weight is its own master."""
    moments: int
    """Optimizer moments, float32: two for AdamW, one for Muon."""
    updated: int
    """Values that this rank updates."""
    activations: int
    """Activations that one micro-batch's forward pass saves for backward."""
    disk: int
    """Part of all these bytes that is swapped to zero.nvme_path."""
    kept_on_disk: int
    """Part that is stored in train.store_path."""
    buffers: int
    """Host buffers into which swapped state is read and updated."""
    host: int
    """Host memory, also with a GPU: offloaded or stored data (train.store), and the buffers."""
    weights_offloaded: int
    """Weight bytes in host memory or on disk."""
    gradients_offloaded: int
    """Gradient bytes there."""
    optimizer_offloaded: int
    """Master and moment bytes there."""
    building: int
    """Host memory during startup, also with a GPU: stage 3 flattens a rank's weights there."""

    @property
    def optimizer(self) -> int:
        """Master and moment bytes."""
        return self.masters + self.moments

    @property
    def state(self) -> int:
        """All bytes except activations, in any place: the part that ``zero.stage`` affects."""
        return self.weights + self.gradients + self.optimizer

    @property
    def training(self) -> int:
        """Bytes held in memory at once within a step."""
        return self.state - self.disk + self.buffers + self.activations - self.kept_on_disk

    @property
    def on_device(self) -> int:
        """Part of ``training`` on the rank's device."""
        return self.training - self.host


def memory_by_stage(config: ResolvedConfig, model: ModelConfig, world_size: int) -> dict[int, Memory]:
    """Return each rank's memory for every ZeRO stage that can train in the run's dtype."""
    stages = [1, 2, 3]
    # Stage 0 has no float32 accumulation for bfloat16.
    if config.dtype == torch.float32:
        stages = [0, *stages]
    # Only stage 3 can swap.
    if config.zero.nvme_path:
        stages = [3]
    found = {}
    for stage in stages:
        found[stage] = memory_of_rank(config.changed({"zero.stage": stage}), model, world_size)
    return found


def memory_of_rank(config: ResolvedConfig, model: ModelConfig, world_size: int) -> Memory:
    """Return the memory for each of ``world_size`` ranks; ``config`` has its dtype and stage resolved."""
    counts = count_parameters(model)
    whole = sum(counts.values())
    # Before ZeRO, a rank holds its own experts and all other weights.
    held = whole - counts["routed_experts"] + counts["routed_experts"] // config.parallel.expert
    trained, trained_here = whole, held
    if model.adapter.is_used:
        # All counted so far are frozen: adapters come on top.
        trained, trained_here = num_trained_of_all(config), num_trained(config)
        whole, held = whole + trained, held + trained_here
    part = -(-trained // world_size)
    width, stage = config.dtype.itemsize, config.zero.stage
    weights = held * width - quantization_savings(config, expert=config.parallel.expert)
    gradients, masters, building = trained_here * FLOAT32, part * FLOAT32, 0
    if stage == 0:
        masters, part = 0, trained_here
    elif stage == 2:
        gradients = part * FLOAT32
    elif stage == 3:
        weights = -(-whole // world_size) * width - quantization_savings(config, expert=1) // world_size
        gradients = part * FLOAT32
        building = weights
    moments = 2 * part * FLOAT32
    if config.train.optimizer == "muon":
        moments -= round(part * num_orthogonal(config) / held) * FLOAT32
    in_memory, on_disk, buffers = 0, 0, 0
    weights_offloaded = gradients_offloaded = optimizer_offloaded = 0
    if config.zero.offload != "none":
        # AdamW reads a gradient copy there; stage 3 also collects gradients in host memory.
        copied = part * FLOAT32
        optimizer_offloaded, gradients_offloaded = masters + moments, copied
        in_memory = masters + moments + copied
        if config.zero.offload == "nvme":
            in_memory, on_disk = 0, in_memory
            # DeepSpeed's four buffers for a sub-group: master, both moments and gradient.
            buffers = 4 * min(part, update_size("nvme", zero_options(config.zero).sub_group_size)) * FLOAT32
        if stage == 3:
            in_memory += gradients
            gradients_offloaded += gradients
        gradients += copied
    if stage == 3 and config.zero.offload_parameters == "cpu":
        in_memory += weights
        weights_offloaded = weights
    elif stage == 3 and config.zero.offload_parameters == "nvme":
        on_disk += weights
        weights_offloaded = weights
    activations, kept_on_disk = _activation_bytes(config, model), 0
    if config.train.store == "disk":
        kept_on_disk = activations
    elif config.train.store == "host" and config.train.chunk_tokens:
        in_memory += activations
    elif config.train.store == "host":
        # The last block's activations stay on the device.
        in_memory += activations * (model.depth - 1) // model.depth
    return Memory(
        weights=weights,
        gradients=gradients,
        masters=masters,
        moments=moments,
        updated=part,
        disk=on_disk,
        kept_on_disk=kept_on_disk,
        buffers=buffers,
        host=in_memory + buffers,
        activations=activations,
        weights_offloaded=weights_offloaded,
        gradients_offloaded=gradients_offloaded,
        optimizer_offloaded=optimizer_offloaded,
        building=building,
    )


def _activation_bytes(config: ResolvedConfig, model: ModelConfig) -> int:
    """Return bytes saved by the blocks of all stages and the encoder, for this rank's tokens in a micro-batch."""
    stages, encoder = stage_runs(config), encoder_run(config)
    if len(stages) > 1:
        return sum(_saved_by_blocks(stage, stage.model.config()) for stage in stages)
    total = _saved_by_blocks(config, model)
    if encoder is not None:
        total += _saved_by_blocks(encoder, encoder.model.config())
    return total


def _saved_by_blocks(config: ResolvedConfig, model: ModelConfig) -> int:
    tokens = config.data.seq_len * config.train.micro_batch_rows // config.parallel.context
    heads = model.num_heads * model.value_dim
    if config.train.keep == "inputs":
        return tokens * model.depth * model.hidden_size * config.dtype.itemsize
    if config.train.keep == "attention":
        # Each block's input, and attention's output; all others are recomputed.
        return tokens * model.depth * (model.hidden_size + heads) * config.dtype.itemsize
    projected = model.head_dim * (model.num_heads + model.num_kv_heads) + model.num_kv_heads * model.value_dim
    if config.train.chunk_tokens:
        # Tensors between projections, attention and FFN; all others are recomputed.
        return tokens * model.depth * (model.hidden_size + projected + heads) * config.dtype.itemsize
    # Inputs to both norms, to attention and to the FFN; queries, keys, values and attention's output.
    values = 4 * model.hidden_size + projected + heads
    ffn = sum(_ffn_values(config, model, layer) for layer in range(model.depth))
    return tokens * (model.depth * values + ffn) * config.dtype.itemsize


def _ffn_values(config: ResolvedConfig, model: ModelConfig, layer: int) -> int:
    """Return how many values a layer's FFN saves per token."""
    # The activation's input, and its gate.
    projections = 1
    if model.activation in GATED:
        projections = 2
    if not model.has_experts(layer):
        return projections * model.ffn_size
    values = projections * model.shared_ffn_size
    if config.train.recompute_experts != "all":
        values += projections * model.experts_per_token * model.expert_ffn_size
    return values


# --------------------------------------------------------------------------------------------- the copy of a checkpoint


def copies_checkpoints(config: ResolvedConfig, step: int) -> bool:
    """Return True if a run at ``step`` will copy a checkpoint, so that it trains while the copy is written."""
    every = config.checkpoint.every_steps
    # With NVMe offload, state is on a disk because memory has no room for it.
    if config.checkpoint.wait or not every or config.zero.offload == "nvme":
        return False
    # Training always waits for the last step's checkpoint.
    return (step // every + 1) * every < config.last_step


def checkpoint_copy_bytes(config: ResolvedConfig, world: World) -> int:
    """Return bytes on the rank that copies most; 0 if no rank copies. ``config`` has its stage resolved.

    A thread writes a checkpoint from this copy, one master and two moments per value, while training continues. It does
    not decide whether the run fits: a run without this memory waits for its saves.
    """
    if not copies_checkpoints(config, 0):
        return 0
    shapes = {name: p.numel() for name, p in build_shapes(config).named_parameters() if p.requires_grad}
    # A rank has its own routed experts, replicated on fewer ranks; all other weights are on all ranks.
    expert = {name: config.parallel.expert if is_expert_weight(name) else 1 for name in shapes}
    if config.zero.stage:
        return 3 * FLOAT32 * sum(-(-numel * expert[name] // world.ranks) for name, numel in shapes.items())
    owned = [0] * world.ranks
    for index, (name, numel) in enumerate(shapes.items()):
        # Full tensors, assigned in turn to the ranks that hold the same ones.
        turn = index % (world.ranks // expert[name])
        for rank in range(turn * expert[name], (turn + 1) * expert[name]):
            owned[rank] += numel
    return 3 * FLOAT32 * max(owned)


# ------------------------------------------------------------------------------------------------------- the machine


def free_memory_bytes(device: torch.device) -> int:
    """Return free memory on the training device: the GPU's, or this machine's for all local ranks together.

    Memory that the machine may still gain counts as free: ``check_memory`` has warned about it by then.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes(with_growth=True)


def check_memory(
    config: ResolvedConfig, model: ModelConfig, world_size: int, local_ranks: int, device: torch.device
) -> None:
    """Raise ConfigError, with the arithmetic, if this machine has less free memory than the run's minimum.

    Only warn if the machine reports that its memory may grow by the missing amount.
    """
    if not config.run.memory_check:
        return
    need = memory_of_rank(config, model, world_size)
    gpu: int | None = None
    if device.type == "cuda":
        gpu = free_memory_bytes(device)

    def problem_with(host: int) -> str | None:
        return why_too_large(config, model, need, local_ranks=local_ranks, host_bytes=host, gpu_bytes=gpu)

    problem = problem_with(available_bytes())
    if problem is None:
        return
    if problem_with(available_bytes(with_growth=True)) is None:
        log.warning("%s\nThis machine's memory may grow during use, so the run starts anyway.", problem)
        return
    hint = _memory_hint(config, model, need, world_size, on_gpu=gpu is not None)
    raise ConfigError(f"{problem}\n{hint}")


def why_too_large(
    config: ResolvedConfig,
    model: ModelConfig,
    need: Memory,
    *,
    local_ranks: int,
    host_bytes: int,
    gpu_bytes: int | None,
) -> str | None:
    """Explain line by line why the run does not fit into free memory; return None if it fits.

    ``gpu_bytes`` is free memory on each rank's GPU, None if ranks compute on the CPU. ``host_bytes`` is free memory on
    the machine.
    """
    ranks, parameters = format_count(local_ranks, "rank"), sum(count_parameters(model).values())
    if gpu_bytes is not None and need.on_device > gpu_bytes:
        has = f"and {gib(gpu_bytes)} are free on its GPU"
        return "\n".join([_headline(need.on_device, has, parameters), *_parts(config, need)])
    if gpu_bytes is not None and local_ranks * need.host > host_bytes:
        has = f"with {ranks} on this machine and {gib(host_bytes)} of host memory free for offloading"
        return "\n".join([_headline(need.host, has, parameters), *_parts(config, need)])
    if gpu_bytes is None and local_ranks * need.training > host_bytes:
        has = f"with {ranks} on this machine and {gib(host_bytes)} free"
        return "\n".join([_headline(need.training, has, parameters), *_parts(config, need)])
    if local_ranks * need.building > host_bytes:
        has = f"with {ranks} on this machine and {gib(host_bytes)} of host memory free"
        how = "  Stage 3 flattens a rank's weights in host memory before copying them to its GPU."
        return f"{_headline(need.building, has, parameters)}\n{how}"
    return None


def _headline(num_bytes: int, has: str, parameters: int) -> str:
    return f"This run does not fit: a rank needs at least {gib(num_bytes)}, {has} ({parameters:,} parameters)."


def _parts(config: ResolvedConfig, need: Memory) -> list[str]:
    weights, kind = config.train.dtype, config.model.adapter.quantize_base
    if kind != "none":
        weights += f", the blocks' frozen matrices in {kind}"
    how = {
        "weights": weights,
        "gradients": "float32",
        "optimizer": "float32 masters and moments",
        "activations": f"{config.data.seq_len * config.train.micro_batch_rows // config.parallel.context} tokens",
    }
    lines = [f"  {name:<12}{gib(getattr(need, name)):>12}  {text}" for name, text in how.items()]
    if need.kept_on_disk:
        lines.append(f"  {'stored':<12}{'-' + gib(need.kept_on_disk):>12}  moved to train.store_path")
    lines.append(f"  {'together':<12}{gib(need.training):>12}  (zero.stage={config.zero.stage})")
    if need.disk:
        lines.insert(-1, f"  {'buffers':<12}{gib(need.buffers):>12}  for swapping: zero.sub_group_size sets their size")
        lines.insert(-1, f"  {'swapped':<12}{'-' + gib(need.disk):>12}  moved to zero.nvme_path")
    if need.host:
        lines.append(f"  {'offloaded':<12}{gib(need.host):>12}  of these")
    return lines


def _memory_hint(config: ResolvedConfig, model: ModelConfig, need: Memory, world_size: int, *, on_gpu: bool) -> str:
    """Suggest settings that need less memory, with their bytes."""
    # The cheapest setting that saves fewer activations.
    keep = "attention" if config.train.keep == "all" else "inputs"
    changed = config.changed({"zero.stage": 3, "train.keep": keep, "train.recompute_experts": "all"})
    smaller = memory_of_rank(changed, model, world_size)
    lines = []
    if smaller.training < need.training:
        lines.append(
            f"--zero.stage 3 and --train.keep {keep} would need {gib(smaller.training)} on each of "
            f"{format_count(world_size, 'rank')}; more machines reduce this."
        )
    else:
        lines.append("More machines, a larger parallel.context (fewer tokens per rank) or a smaller model need less.")
    # Only with a GPU: on a CPU there is no other memory to move to.
    if on_gpu:
        lines.extend(_offload_hint(changed, model, world_size))
    lines.append("--run.memory_check false starts anyway.")
    return "\n".join(lines)


def _offload_hint(changed: ResolvedConfig, model: ModelConfig, world_size: int) -> list[str]:
    moved = {}
    if changed.zero.offload == "none":
        moved["zero.offload"] = "cpu"
    if changed.train.store == "device" and model.num_layers > 1:
        moved["train.store"] = "host"
    if not moved:
        return []
    most = memory_of_rank(changed.changed(moved), model, world_size)
    flags = [f"--{key} {value}" for key, value in moved.items()]
    return [
        f"With {' and '.join(flags)} as well, it is {gib(most.on_device)} on the GPU and {gib(most.host)} in host "
        "memory."
    ]


def gib(num_bytes: float) -> str:
    """Format bytes in MiB or GiB."""
    if num_bytes < 10 * 2**20:
        return f"{num_bytes / 2**20:.1f} MiB"
    if num_bytes < GIB:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / GIB:.1f} GiB"

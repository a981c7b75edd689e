"""A run's configuration, shrunk: fewer and narrower layers, shorter rows, unchanged parallelism."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from launcher.config.image_objective import complete_images
from launcher.config.resolved import ResolvedConfig
from longctx.architecture.image import ImageShape
from longctx.config import ModelConfig

TOKENS_A_RANK = 256
"""Most tokens per row and rank: several kernel tiles, few enough for one process to hold all."""
LEAST_TOKENS = 16
"""Fewest tokens per row, if the run has as many: a row has several documents, and one spans ranks."""
WIDTH, FFN_WIDTH, EXPERT_WIDTH, VOCABULARY = 256, 512, 64, 4096
MICRO_BATCHES = 2
"""Enough to verify gradient accumulation."""


@dataclass(frozen=True)
class Shrunk:
    """Small config, and the changes made to get there."""

    config: ResolvedConfig
    changes: tuple[str, ...]
    """One line per change: key, old value, new value."""


def shrink(config: ResolvedConfig, world_size: int) -> Shrunk:
    """Return the config with a small model and short rows.

    Degrees, layout, transport, kernel, heads, ZeRO, dtype, chunk count and all loss terms are unchanged. No value
    grows.
    """
    context, micro_batches = config.parallel.context, config.micro_batches(world_size)
    seq_len = _row_tokens(config)
    model = {}
    if config.model.image.is_used:
        model = _image_fields(config.model, seq_len)
        if config.model.image.window:
            seq_len = _windows_row(config, model, seq_len)
    # First and last micro-batch: if their sizes differ by a row, the small run's do too.
    sizes = (micro_batches.sizes[0], micro_batches.sizes[-1])[: min(MICRO_BATCHES, len(micro_batches))]
    rows = sum(sizes) * micro_batches.data_degree
    share = seq_len / config.data.seq_len
    train: dict[str, Any] = {"tokens_per_step": rows * seq_len}
    if config.train.chunk_tokens:
        train["chunk_tokens"] = max(1, math.ceil(config.train.chunk_tokens * share))
    parallel: dict[str, Any] = {}
    if config.parallel.tokens_per_rank:
        # Room for as many rows as before.
        parallel["tokens_per_rank"] = math.ceil(sizes[0] * seq_len / context)
    if config.parallel.expert_tile_tokens:
        parallel["expert_tile_tokens"] = max(1, math.ceil(config.parallel.expert_tile_tokens * share))
    sections = {
        "model": {**_model(config.model, share, config.parallel.expert), **model},
        "data": {"seq_len": seq_len, "source_seq_len": math.ceil(config.data.source_seq_len * share)},
        "train": train,
        "parallel": parallel,
    }
    changes = []
    for section, values in sections.items():
        before = getattr(config, section)
        for key, value in values.items():
            if getattr(before, key) != value:
                changes.append(f"{section}.{key}: {getattr(before, key)} → {value}")
        config = dataclasses.replace(config, **{section: dataclasses.replace(before, **values)})
    return Shrunk(config, tuple(changes))


def _row_tokens(config: ResolvedConfig) -> int:
    context, most = config.parallel.context, TOKENS_A_RANK * config.parallel.context
    if config.parallel.tokens_per_rank:
        # For all concatenated rows; enough for several documents, and at least one token per rank.
        most = max(context, LEAST_TOKENS, most // config.train.micro_batch_rows)
    return min(config.data.seq_len, most)


def _image_fields(model: ModelConfig, row_tokens: int) -> dict[str, Any]:
    """Return fields for smaller images: two fit into a row, unless the smallest windows are too large."""
    image = _shrink_image(model.image, row_tokens // 2)
    values: dict[str, Any] = {}
    if image.depths:
        # Every stage keeps a layer of each kind.
        depths = tuple(min(depth, max(2, len(model.layers))) for depth in image.depths)
        image, values["num_layers"] = dataclasses.replace(image, depths=depths), sum(depths)
    values["image"] = image
    if model.position == "learned":
        values["max_positions"] = image.num_tokens
    return values


def _shrink_image(image: ImageShape, most_tokens: int) -> ImageShape:
    """Return the image with smaller windows, then fewer rows and columns, until it has at most ``most_tokens``."""
    # A side is a number of windows in the last stage, or without windows of tokens.
    patch, halvings = image.patch or 1, 2 ** max(0, len(image.depths) - 1)
    window = max(1, image.window)
    counts = [side // (patch * window * halvings) for side in (image.height, image.width)]
    while True:
        height, width = (count * patch * window * halvings for count in counts)
        smaller = dataclasses.replace(image, height=height, width=width, window=image.window and window)
        if smaller.num_tokens <= most_tokens:
            return smaller
        # A window of 2 × 2 still has a shift.
        if window > 2:
            window = max(2, window // 2)
        elif max(counts) > 1:
            side = counts.index(max(counts))
            counts[side] = -(-counts[side] // 2)
        else:
            return smaller


def _windows_row(config: ResolvedConfig, model: dict[str, Any], most: int) -> int:
    """Return the row length of complete images nearest below ``most``, at least two images if the run's rows do."""
    small = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
    unit = complete_images(small)
    least = min(2, config.data.seq_len // config.model.image.num_tokens)
    return max(-(-least * small.model.image.num_tokens // unit), most // unit) * unit


def _model(model: ModelConfig, share: float, expert_degree: int) -> dict[str, Any]:
    """Return fields for a small model that keeps every kind of layer."""
    layers = _num_layers(model)
    values: dict[str, Any] = {
        "num_layers": layers,
        "encoder_layers": min(model.encoder_layers, layers),
        "mtp_layers": min(model.mtp_layers, 2),
        "hidden_size": min(model.hidden_size, WIDTH),
        "ffn_size": min(model.ffn_size, FFN_WIDTH),
        "vocab_size": min(model.vocab_size, VOCABULARY),
        "output_vocab_size": min(model.output_vocab_size, VOCABULARY - 1),
        "dense_layers": tuple(layer for layer in model.dense_layers if layer < layers),
    }
    if model.window:
        # The same share of the row as before.
        values["window"] = max(1, math.ceil(model.window * share))
    if model.sparse_stride:
        values["sparse_stride"] = max(1, math.ceil(model.sparse_stride * share))
    for name in ("q_lora_rank", "kv_lora_rank"):
        values[name] = min(getattr(model, name), WIDTH // 2)
    if model.num_experts:
        values["num_experts"] = _num_experts(model, expert_degree)
        values["expert_ffn_size"] = min(model.expert_ffn_size, EXPERT_WIDTH)
        values["shared_ffn_size"] = min(model.shared_ffn_size, EXPERT_WIDTH)
    return values


def _num_layers(model: ModelConfig) -> int:
    """Return the fewest layers that include all combinations of attention and FFN kinds."""
    kinds = [_kind(model, layer) for layer in range(model.num_layers)]
    # Layers are taken from the first on, up to the one that completes the set of kinds.
    min_layers = max(kinds.index(kind) for kind in kinds) + 1
    # Layer patterns must fit, and a single layer would have no neighbour.
    return min(model.num_layers, max(2, min_layers, len(model.layers), len(model.rope_layers)))


def _kind(model: ModelConfig, layer: int) -> tuple[Any, ...]:
    return model.layer_kind(layer), model.has_experts(layer), model.has_rope(layer)


def _num_experts(model: ModelConfig, expert_degree: int) -> int:
    """Return the fewest experts that leave tokens a choice, and that groups and ranks divide."""
    step = math.lcm(expert_degree, model.expert_groups)
    # The groups open to a token need twice the experts it takes; each group and each rank needs two.
    within = model.groups_per_token / model.expert_groups
    least = max(2 * model.experts_per_token / within, 2 * model.expert_groups, 2 * expert_degree)
    return min(model.num_experts, step * math.ceil(least / step))

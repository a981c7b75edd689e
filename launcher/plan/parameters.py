"""Names and shapes for a rank's weights before ZeRO, from a model that is never allocated."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from launcher.config.resolved import ResolvedConfig
from launcher.plan.planned_world import World
from longctx.architecture.size import count_parameters
from longctx.config import ModelConfig
from longctx.model.decoder import Decoder
from longctx.model.experts.dispatch import TokenDispatcher
from parallel.experts.dispatcher import AllToAllDispatcher
from parallel.mesh import Mesh


def planned_mesh(config: ResolvedConfig, world: World) -> Mesh:
    """Build rank 0's mesh without process groups."""
    parallel = config.parallel
    return Mesh(
        rank=0,
        world_size=world.ranks,
        context=parallel.context,
        ulysses=parallel.ulysses,
        expert=parallel.expert,
        ranks_per_node=world.ranks_per_node,
    )


def build_shapes(config: ResolvedConfig) -> Decoder:
    """Build a run's decoder on the meta device, with one rank's experts; cached per model. No weight is quantized."""
    return _decoder(config.model.config(), config.parallel.expert)


def build_stored(config: ResolvedConfig) -> Decoder:
    """Build the same with quantized weights as bytes, as the rank stores them."""
    return _decoder(config.model.config(), config.parallel.expert, is_stored=True)


def quantization_savings(config: ResolvedConfig, *, expert: int) -> int:
    """Return how many bytes fewer a rank stores because of a quantized base; ``expert`` ranks share the experts."""
    model = config.model.config()
    if not model.adapter.is_quantized:
        return 0
    layouts = _decoder(model, expert, is_stored=True).layouts.values()
    return sum(layout.numel * config.dtype.itemsize - layout.num_bytes for layout in layouts)


def num_parameters(config: ResolvedConfig) -> int:
    """Count a rank's parameters before ZeRO."""
    return _count(build_shapes(config))


def num_trained(config: ResolvedConfig) -> int:
    """Count those that are trained: the gradient values that the rank sends."""
    return _count(build_shapes(config), trained=True)


def num_trained_of_all(config: ResolvedConfig) -> int:
    """Count the full model's trained parameters, each expert once."""
    return _trained(config.model.config())


def num_layer_gradients(config: ResolvedConfig, layer: int | None = None) -> int:
    """Count gradient values in one layer, or in all layers, excluding embedding, last norm and output head."""
    layers = blocks_of(config)
    if layer is None:
        return _count(layers, trained=True)
    return _count(layers[layer % len(layers)], trained=True)


def num_ffn_gradients(config: ResolvedConfig, layer: int) -> int:
    """Count gradient values in a layer's FFN or experts."""
    layers = blocks_of(config)
    block: Any = layers[layer % len(layers)]
    return _count(block.mlp, trained=True)


def blocks_of(config: ResolvedConfig) -> nn.ModuleList:
    """Return the model's blocks, over all stages."""
    return _blocks(build_shapes(config))


@cache
def _trained(model: ModelConfig) -> int:
    if not model.adapter.is_used:
        return sum(count_parameters(model).values())
    return _count(_decoder(model, 1), trained=True)


@cache
def _blocks(decoder: Decoder) -> nn.ModuleList:
    return nn.ModuleList(decoder.model.layers)


@cache
def _count(module: nn.Module, *, trained: bool = False) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


@cache
def _decoder(model: ModelConfig, expert: int, *, is_stored: bool = False) -> Decoder:
    if not is_stored:
        # Matmuls and counts are those of the values.
        model = replace(model, adapter=model.adapter.without_quantization())
    dispatcher: TokenDispatcher = TokenDispatcher()
    if expert > 1:
        dispatcher = AllToAllDispatcher(Mesh(rank=0, world_size=expert, context=1, expert=expert), model.num_experts)
    with torch.device("meta"):
        return Decoder(model, dispatcher=dispatcher, seed=None)

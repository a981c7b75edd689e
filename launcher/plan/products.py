"""Seconds of the products of weights in one micro-batch, by the shapes of the weights.

Names of axes: O outer width, I inner width of a weight, e experts of a rank.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

from torch import nn

from launcher.config.resolved import ResolvedConfig
from launcher.plan.hardware import Hardware
from launcher.plan.parameters import build_shapes
from launcher.plan.rates import Rate
from longctx.kernels.cross_entropy import tokens_of_chunk
from longctx.model.experts.blocks import BLOCK_TOKENS
from longctx.model.experts.experts import is_expert_weight


@dataclass(frozen=True)
class Weight:
    """A matrix that tokens are multiplied by."""

    outer: int
    inner: int
    num_experts: int = 0
    """Of how many experts on this rank it is one's; 0 where every token meets it."""
    is_last: bool = False
    """Whether it is the last product of its part of a layer, whose result no backward reads."""


def weights_of_layers(config: ResolvedConfig) -> Counter[Weight]:
    """The weights of all layers, alike ones counted: no tables, norms and biases, and neither embedding nor head."""
    return _weights_in(build_shapes(config).model.layers)


@cache
def _weights_in(layers: nn.Module) -> Counter[Weight]:
    found: Counter[Weight] = Counter()
    for name, p in layers.named_parameters():
        is_last = name.endswith("down_proj.weight") or name.endswith(".down_proj")
        if is_expert_weight(f".{name}"):
            if p.ndim == 3:
                outer, inner = p.shape[1:]
                found[Weight(outer, inner, p.shape[0], is_last)] += p.shape[0]
        elif p.ndim == 2 and name.endswith(".weight"):
            found[Weight(p.shape[0], p.shape[1], is_last=is_last)] += 1
    return found


def product_seconds(config: ResolvedConfig, tokens: int, hardware: Hardware) -> float:
    """Forward, backward and what is computed again of it, for a rank's ``tokens`` of a micro-batch."""
    chunk = min(config.train.chunk_tokens or tokens, tokens)
    total, chosen = 0.0, config.model.experts_per_token
    for weight, count in weights_of_layers(config).items():
        rows, at_once = float(tokens), float(chunk)
        if weight.num_experts:
            # Every expert is chosen equally often: by the tokens of this rank, and of those that share its experts.
            rows = tokens * chosen / weight.num_experts
            at_once = min(rows * chunk / tokens, _most_of_expert(hardware))
        forwards = 1 + _again(config, weight)
        total += count * _seconds(config, hardware, weight, rows, at_once, forwards)
    return total + _head_seconds(config, tokens, hardware)


def _head_seconds(config: ResolvedConfig, tokens: int, hardware: Hardware) -> float:
    """The logits and their two products back, never computed again."""
    head = Weight(config.model.vocab_size, config.model.hidden_size)
    at_once = min(tokens, tokens_of_chunk(head.outer, head.inner, hardware.device_type))
    return _seconds(config, hardware, head, tokens, at_once, 1)


def _seconds(
    config: ResolvedConfig, hardware: Hardware, weight: Weight, rows: float, at_once: float, forwards: int
) -> float:
    """``rows`` through a weight, so many ``at_once``."""
    # The rate is that of a product of as many values, as if the weight were square.
    flops = 2.0 * rows * weight.outer * weight.inner
    width, dtype = math.sqrt(weight.outer * weight.inner), config.train.dtype

    def of(rate: Rate) -> float:
        return flops / rate.at(dtype, tokens=at_once, width=width)

    # Two products of backward: the gradients of rows and of weights.
    return forwards * of(hardware.product_flops) + 2 * of(hardware.product_backward_flops)


def _again(config: ResolvedConfig, weight: Weight) -> int:
    """Whether backward computes a product of forward once more."""
    train = config.train
    if weight.num_experts:
        # An expert's last product is never formed again, and the others where their result was not saved.
        return int(not weight.is_last and (train.keep != "all" or train.recompute_experts == "all"))
    if config.train.chunk_tokens:
        return int(not weight.is_last)
    return int(train.keep != "all")


def _most_of_expert(hardware: Hardware) -> float:
    """Tokens of an expert that are multiplied at once."""
    if hardware.device_type == "cpu":
        return BLOCK_TOKENS
    return math.inf

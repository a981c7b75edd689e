"""A rank's compute seconds per micro-batch, excluding attention: weight matmuls, and all work between them.

Matmuls depend on weight shapes; norms, activations, sums and the loss on bytes and bandwidths. Axes: O outer width, I
inner width of a weight, M model width, F inner FFN width, e local experts.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

from torch import nn

from launcher.config.resolved import ResolvedConfig
from launcher.plan.activations import sums_head_by_rows
from launcher.plan.encoder import num_source_tokens
from launcher.plan.hardware import Hardware
from launcher.plan.parameters import blocks_of, build_shapes, num_layer_gradients
from launcher.plan.rates import Rate
from launcher.plan.stages import stage_runs
from longctx.config import ModelConfig
from longctx.kernels.cross_entropy import tokens_of_chunk
from longctx.model.experts.expert_blocks import BLOCK_TOKENS
from longctx.model.experts.experts import is_expert_weight

_FLOAT32 = 4


@dataclass(frozen=True)
class MatmulWeight:
    """Matrix that multiplies tokens."""

    outer: int
    inner: int
    num_experts: int = 0
    """Local experts, if it is one expert's weight; 0 if it multiplies every token."""
    is_last: bool = False
    """True for the FFN's or an expert's down projection; no backward reads its result."""
    of_source: bool = False
    """True if it multiplies source tokens instead of the batch's own: keys and values in cross attention."""
    is_frozen: bool = False
    """True if backward computes no gradient for it."""


@cache
def weights_in(layers: nn.Module) -> Counter[MatmulWeight]:
    """Count the weights in all layers by shape, excluding tables, norms, biases, embedding and head."""
    found: Counter[MatmulWeight] = Counter()
    for name, p in layers.named_parameters():
        is_last = name.endswith("down_proj.weight") or name.endswith(".down_proj")
        frozen = not p.requires_grad
        if is_expert_weight(f".{name}"):
            if p.ndim == 3:
                outer, inner = p.shape[1:]
                found[MatmulWeight(outer, inner, p.shape[0], is_last, is_frozen=frozen)] += p.shape[0]
        elif p.ndim == 2 and name.endswith((".weight", "lora_A", "lora_B")) and "relative_bias" not in name:
            of_source = "cross_attn.k_" in name or "cross_attn.v_" in name
            weight = MatmulWeight(*p.shape, is_last=is_last, of_source=of_source, is_frozen=frozen)
            found[weight] += 1
    return found


def matmul_seconds(config: ResolvedConfig, tokens: int, hardware: Hardware, *, has_head: bool = True) -> float:
    """Compute matmul seconds for a rank's ``tokens`` in a micro-batch: forward, backward and recomputation.

    ``has_head`` is False for an encoder that accompanies a decoder.
    """
    stages = stage_runs(config)
    if len(stages) > 1:
        return _matmul_seconds_of_stages(config, stages, tokens, hardware)
    chunk = min(config.train.chunk_tokens or tokens, tokens)
    total, chosen = 0.0, config.model.experts_per_token
    most_of_expert = BLOCK_TOKENS if hardware.device_type == "cpu" else math.inf
    blocks = blocks_of(config)
    # With shared weights, each block runs once per layer.
    uses = config.model.num_layers // len(blocks)
    weights = Counter({weight: uses * count for weight, count in weights_in(blocks).items()})
    if config.model.mtp_layers:
        weights += weights_in(build_shapes(config).model.mtp)
    for weight, count in weights.items():
        rows, at_once = float(tokens), float(chunk)
        if weight.num_experts:
            # Balanced load: local experts serve tokens from this rank and from the ranks that share its experts.
            rows = tokens * chosen / weight.num_experts
            at_once = min(rows * chunk / tokens, most_of_expert)
        if weight.of_source:
            # Source tokens are not chunked, even if the batch's own tokens are.
            rows = at_once = float(num_source_tokens(config))
        forwards = 1 + _again(config, weight)
        total += count * _seconds(config, hardware, weight, rows, at_once, forwards)
        if weight.is_frozen and config.model.adapter.is_quantized:
            # Every forward and backward pass of a chunk needs the values.
            passes = (forwards + 1) * math.ceil(tokens / chunk)
            total += count * passes * _dequantize_seconds(config, hardware, weight)
    if not has_head:
        return total
    model, rows = config.model.config(), tokens * config.head_share
    if model.predicts_tokens:
        # The logits, and two matmuls in backward.
        head = MatmulWeight(model.head_rows, model.embedding_dim, is_frozen=model.adapter.is_used)
        at_once = min(rows, tokens_of_chunk(head.outer, head.inner, hardware.device_type))
        forwards = 1 + sums_head_by_rows(config, model)
        total += (1 + model.mtp_layers) * _seconds(config, hardware, head, rows, at_once, forwards)
    for weight, share in embedding_projections(model, config.head_share).items():
        total += _seconds(config, hardware, weight, share * tokens, share * tokens, 1)
    return total


def _matmul_seconds_of_stages(
    config: ResolvedConfig, stages: list[ResolvedConfig], tokens: int, hardware: Hardware
) -> float:
    """Compute matmul seconds for a model with stages: blocks, merged patches and the patch projection."""
    total = 0.0
    for weight, share in embedding_projections(config.model.config(), 1.0).items():
        total += _seconds(config, hardware, weight, share * tokens, share * tokens, 1)
    for number, stage in enumerate(stages):
        rows = float(tokens // 4**number)
        total += matmul_seconds(stage, int(rows), hardware, has_head=False)
        if number:
            width = stage.model.hidden_size
            # Four patches of half the width.
            total += _seconds(config, hardware, MatmulWeight(width, 2 * width), rows, rows, 1)
    return total


def embedding_projections(model: ModelConfig, head_share: float) -> dict[MatmulWeight, float]:
    """Return the matmuls between model width and embedding width, or patches, each with its share of tokens."""
    found: dict[MatmulWeight, float] = {}
    if model.image.patch:
        found[MatmulWeight(model.embedding_dim, model.image.pixel_bytes)] = 1.0
    if model.embedding_size:
        found[MatmulWeight(model.hidden_size, model.embedding_size)] = 1.0
    if model.head_transform:
        found[MatmulWeight(model.embedding_dim, model.hidden_size)] = head_share
    return found


def _seconds(
    config: ResolvedConfig, hardware: Hardware, weight: MatmulWeight, rows: float, at_once: float, forwards: int
) -> float:
    """Return seconds for ``rows`` through a weight, ``at_once`` at a time."""
    # Look up the rate for a square weight with as many elements.
    flops = 2.0 * rows * weight.outer * weight.inner
    width, dtype = math.sqrt(weight.outer * weight.inner), config.train.dtype

    def of(rate: Rate) -> float:
        return flops / rate.at(dtype, tokens=at_once, width=width)

    # Backward has two matmuls: gradients for rows, and for weights unless they are frozen.
    backwards = 2 - weight.is_frozen
    return forwards * of(hardware.product_flops) + backwards * of(hardware.product_backward_flops)


def _dequantize_seconds(config: ResolvedConfig, hardware: Hardware, weight: MatmulWeight) -> float:
    """Return seconds to compute a quantized weight's values, a few bytes for each read and written in four passes."""
    num_bytes = 4.0 * _FLOAT32 * weight.outer * weight.inner
    return num_bytes / hardware.memory_bandwidth.at(config.train.dtype, bytes=num_bytes)


def _again(config: ResolvedConfig, weight: MatmulWeight) -> int:
    """Return 1 if backward recomputes this forward matmul, otherwise 0."""
    train = config.train
    if weight.num_experts:
        # An expert's last matmul is never recomputed, the others only if their result was not saved.
        return int(not weight.is_last and (train.keep != "all" or train.recompute_experts == "all"))
    if config.train.chunk_tokens:
        return int(not weight.is_last)
    return int(train.keep != "all")


# ------------------------------------------------------------------------------------------------------ other computing


@dataclass(frozen=True)
class _Tokens:
    """A rank's tokens in a micro-batch."""

    config: ResolvedConfig
    model: ModelConfig
    hardware: Hardware
    tokens: int
    at_once: int
    """Tokens that pass through a layer together."""

    def seconds(self, rate: Rate, passes: float, width: float) -> float:
        """Return seconds for ``passes`` over tensors with this width in the run's dtype, ``at_once`` tokens each."""
        dtype = self.config.train.dtype
        a_token = width * self.config.dtype.itemsize
        return passes * self.tokens * a_token / rate.at(dtype, bytes=max(1.0, self.at_once * a_token))


def elementwise_seconds(config: ResolvedConfig, tokens: int, hardware: Hardware, *, has_head: bool = True) -> float:
    """Compute seconds for norms, rotation, activations, sums, routing, and the loss between its matmuls."""
    train, model, stages = config.train, config.model.config(), stage_runs(config)
    if len(stages) > 1:
        shares = [max(1, tokens // 4**number) for number in range(len(stages))]
        return sum(
            elementwise_seconds(stage, share, hardware, has_head=not number)
            for number, (stage, share) in enumerate(zip(stages, shares, strict=True))
        )
    of_tokens = _Tokens(config, model, hardware, tokens, min(config.train.chunk_tokens or tokens, tokens))
    of_experts = sum(map(model.has_experts, range(model.depth)))
    total = model.depth * _attention_seconds(of_tokens)
    if of_experts:
        total += of_experts * _expert_seconds(of_tokens)
    if of_experts < model.depth:
        total += (model.depth - of_experts) * _ffn_seconds(of_tokens, model.ffn_size)
    if has_head:
        # From logits to their gradient: five passes in float32.
        logits = float(_FLOAT32 * tokens * model.head_rows)
        total += 5 * (1 + model.mtp_layers) * logits / hardware.loss_bandwidth.at(train.dtype, bytes=max(1.0, logits))
        # Pixels are normalized in float32, forward and backward: four passes each, and rounded.
        factor = _FLOAT32 / config.dtype.itemsize
        total += of_tokens.seconds(hardware.memory_bandwidth, 10 * factor, model.image.pixel_bytes)
    return total + _weight_sum_seconds(config, tokens, hardware)


def _forwards(config: ResolvedConfig) -> int:
    """Return forward passes per layer; a repeated pass leaves out the last sum."""
    if config.train.keep != "all" or config.train.chunk_tokens:
        return 2
    return 1


def _attention_seconds(of: _Tokens) -> float:
    model, hardware, again = of.model, of.hardware, _forwards(of.config)
    M, heads = model.hidden_size, model.num_heads * model.head_dim + model.num_kv_heads * model.head_dim
    # Each of two norms reads and writes once; backward counts as twice that.
    total = again * of.seconds(hardware.norm_bandwidth, 4, M) + of.seconds(hardware.norm_backward_bandwidth, 8, M)
    # Forward: residual sums after attention and after the FFN; the latter is not recomputed. Backward: both contribute
    # to their input's gradient, and so does each of three projections after one norm.
    total += of.seconds(hardware.memory_bandwidth, 3 * (again + 1) + 12, M)
    return total + of.seconds(hardware.rotary_bandwidth, 2 * (again + 1), heads)


def _ffn_seconds(of: _Tokens, width: int) -> float:
    """Return seconds for a dense FFN's activation, and for summing its input gradients from gate and up."""
    total = _activation_seconds(of, width, of.tokens)
    return total + of.seconds(of.hardware.memory_bandwidth, 3, of.model.hidden_size)


def _activation_seconds(of: _Tokens, width: float, rows: float) -> float:
    """Return seconds for ``rows`` through a gated activation with this width, forward and backward."""
    forwards = _forwards(of.config)
    if of.config.train.chunk_tokens:
        # With chunks, recomputation skips the activation and the matmul after it.
        forwards = 1
    share = rows / of.tokens
    total = forwards * of.seconds(of.hardware.activation_bandwidth, 3, width * share)
    return total + of.seconds(of.hardware.activation_backward_bandwidth, 6, width * share)


def _expert_seconds(of: _Tokens) -> float:
    """Return seconds for the experts' activation, dispatch and combine, and the shared expert."""
    model, hardware, k = of.model, of.hardware, of.model.experts_per_token
    assigned = k * model.hidden_size
    total = of.seconds(hardware.routing_bandwidth, 4, assigned)
    total += of.seconds(hardware.routing_backward_bandwidth, 8, assigned)
    inner = k * model.expert_ffn_size
    total += of.seconds(hardware.activation_bandwidth, 3, inner)
    total += of.seconds(hardware.activation_backward_bandwidth, 6, inner)
    if model.shared_ffn_size:
        total += _ffn_seconds(of, model.shared_ffn_size)
    return total


def _weight_sum_seconds(config: ResolvedConfig, tokens: int, hardware: Hardware) -> float:
    """Return seconds for accumulating weight gradients over chunks: written, read, and added to a float32 sum."""
    if not config.train.chunk_tokens:
        return 0.0
    chunks, parameters = -(-tokens // config.train.chunk_tokens), num_layer_gradients(config)
    uses = config.model.num_layers // len(blocks_of(config))
    moved = uses * chunks * parameters * (2.0 * config.dtype.itemsize + 2 * _FLOAT32)
    # A layer has about seven matrices; the rate depends on bytes per tensor.
    of_tensor = parameters / (7 * config.model.num_layers) * _FLOAT32
    return moved / hardware.memory_bandwidth.at(config.train.dtype, bytes=of_tensor)

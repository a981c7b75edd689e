"""Seconds of what is done beside products and attention in one micro-batch, by kind, from bytes and bandwidths.

Names of axes: M model width, F inner width of an FFN.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.resolved import ResolvedConfig
from launcher.plan.hardware import Hardware
from launcher.plan.parameters import num_layer_parameters
from launcher.plan.rates import Rate
from longctx.config import ModelConfig

_FLOAT32 = 4


@dataclass(frozen=True)
class _Tokens:
    """A rank's tokens of a micro-batch."""

    config: ResolvedConfig
    model: ModelConfig
    hardware: Hardware
    tokens: int
    at_once: int
    """How many of them go through a layer together."""

    def seconds(self, rate: Rate, passes: float, width: float) -> float:
        """Of ``passes`` over tensors of this width, each of a tensor of the tokens at once, in the run's dtype."""
        dtype = self.config.train.dtype
        a_token = width * self.config.dtype.itemsize
        return passes * self.tokens * a_token / rate.at(dtype, bytes=max(1.0, self.at_once * a_token))


def elementwise_seconds(config: ResolvedConfig, tokens: int, hardware: Hardware) -> float:
    """Norms, rotation, activations, sums, tokens to experts, and the loss between its products."""
    train, model = config.train, config.model.config()
    of_tokens = _Tokens(config, model, hardware, tokens, min(config.train.chunk_tokens or tokens, tokens))
    of_experts = sum(map(model.has_experts, range(model.num_layers)))
    total = model.num_layers * _attention_seconds(of_tokens)
    if of_experts:
        total += of_experts * _expert_seconds(of_tokens)
    if of_experts < model.num_layers:
        total += (model.num_layers - of_experts) * _ffn_seconds(of_tokens, model.ffn_size)
    # Logits, from products to gradient: five passes in float32.
    logits = float(_FLOAT32 * tokens * model.vocab_size)
    total += 5 * logits / hardware.loss_bandwidth.at(train.dtype, bytes=max(1.0, logits))
    return total + _weight_sum_seconds(config, tokens, hardware)


def _forwards(config: ResolvedConfig) -> int:
    """How often a layer goes forward but for its last sum."""
    if config.train.keep != "all" or config.train.chunk_tokens:
        return 2
    return 1


def _attention_seconds(of: _Tokens) -> float:
    """Both norms, both sums, rotation, of one layer."""
    model, hardware, again = of.model, of.hardware, _forwards(of.config)
    M, heads = model.hidden_size, model.num_heads * model.head_dim + model.num_kv_heads * model.head_dim
    # Norms read and write; backward counts twice that.
    total = again * of.seconds(hardware.norm_bandwidth, 4, M) + of.seconds(hardware.norm_backward_bandwidth, 8, M)
    # Forward: attention is added, then the FFN, which is not done again. Backward: what both, and each of three
    # projections of one norm, add to the gradient of their input.
    total += of.seconds(hardware.memory_bandwidth, 3 * (again + 1) + 12, M)
    return total + of.seconds(hardware.rotary_bandwidth, 2 * (again + 1), heads)


def _ffn_seconds(of: _Tokens, width: int) -> float:
    """A dense FFN's activation, and the sum of what gate and up add to the gradient of their input."""
    total = _activation_seconds(of, width, of.tokens)
    return total + of.seconds(of.hardware.memory_bandwidth, 3, of.model.hidden_size)


def _activation_seconds(of: _Tokens, width: float, rows: float) -> float:
    """``rows`` through a gated activation of this width, forward and backward."""
    forwards = _forwards(of.config)
    if of.config.train.chunk_tokens:
        # By chunks the second run leaves it out, with the product behind it.
        forwards = 1
    share = rows / of.tokens
    total = forwards * of.seconds(of.hardware.activation_bandwidth, 3, width * share)
    return total + of.seconds(of.hardware.activation_backward_bandwidth, 6, width * share)


def _expert_seconds(of: _Tokens) -> float:
    """Experts' activation, their tokens gathered and their results summed, and the expert that all tokens share."""
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
    """Each chunk's gradients of weights: written, read, and added to a float32 sum."""
    if not config.train.chunk_tokens:
        return 0.0
    chunks, parameters = -(-tokens // config.train.chunk_tokens), num_layer_parameters(config)
    moved = chunks * parameters * (2.0 * config.dtype.itemsize + 2 * _FLOAT32)
    of_tensor = parameters / (7 * config.model.num_layers) * _FLOAT32
    return moved / hardware.memory_bandwidth.at(config.train.dtype, bytes=of_tensor)

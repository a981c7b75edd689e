"""Throughput metrics: one function per quantity, with its formula.

FLOPs here are *model* FLOPs: those that the mathematics requires, two per multiply-add. Extra work by an implementation
(recomputed activations, masked-out scores) is excluded, so a slower method never looks better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from longctx.architecture.adapter import is_adapter
from longctx.architecture.fields import decoder_of, encoder_of
from longctx.architecture.image_stages import stage_configs
from longctx.architecture.layer_specs import mixers_of
from longctx.architecture.size import count_matrices, document_head_size, merging_size, unread_size
from longctx.config import ModelConfig

_PEAK_TFLOPS_BFLOAT16: tuple[tuple[str, float], ...] = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 PCIe", 756.5),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("H800 PCIe", 756.5),
    ("H800", 989.4),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
)
"""Dense bfloat16 tensor-core peak in TFLOP/s from vendor data sheets; the first matching name applies."""


@cache
def matmul_parameters(config: ModelConfig) -> int:
    """Count weights that multiply each token: active experts only; no embedding lookup, norms or biases.

    Includes every ``count_matrices`` entry except the embedding: attention projections; the FFN (``2·M·F``, gated
    ``3·M·F``) or, with experts, the router ``M·E``, chosen experts ``top_k·3·M·F_expert`` and the shared expert
    ``3·M·F_shared`` with its gate ``M``. The output head ``V·M``, tied or untied, counts once, plus once per
    multi-token-prediction block. In a model of patches, the patch projection ``C·P²·M`` counts. A model with stages has
    no such number: its tokens become fewer (``training_flops``).
    """
    assert not config.image.depths, "each stage has its own tokens"
    # A tied head multiplies by the embedding weights, which are also looked up; an untied head has its own weights.
    counts, table = count_matrices(decoder_of(config), active=True, uses=True), config.vocab_size * config.embedding_dim
    num_weights = sum(counts.values())
    if not config.tie_embeddings or not config.predicts_tokens:
        num_weights -= table
    num_weights += config.mtp_layers * head_parameters(config)
    # These heads see one hidden state per document.
    num_weights -= document_head_size(config)
    if config.encoder_layers:
        # Cross attention projects decoder tokens to queries and outputs; keys and values count per source token.
        num_weights += 2 * config.num_layers * config.hidden_size * config.num_heads * config.head_dim
    return num_weights


@cache
def source_parameters(config: ModelConfig) -> int:
    """Count weights that multiply each source token: the encoder, and cross attention's K and V."""
    if not config.encoder_layers:
        return 0
    encoder = encoder_of(config)
    counts = count_matrices(encoder, uses=True)
    num_weights = sum(counts.values()) - counts["head"] - config.vocab_size * config.embedding_dim
    return num_weights + 2 * config.num_layers * config.hidden_size * config.num_kv_heads * config.head_dim


def head_parameters(config: ModelConfig) -> int:
    """Count the head's weights: the output matrix and the projection before it."""
    found = config.head_rows * config.embedding_dim
    if config.head_transform:
        found += config.hidden_size * config.embedding_dim
    return found


def training_flops(
    config: ModelConfig, lengths: Sequence[int], source_lengths: Sequence[int] = (), *, head_share: float = 1.0
) -> int:
    """Compute model FLOPs for one forward and backward pass over documents with these lengths.

    ``6 · matmul_parameters · Σ n + 3 · Σ_layers Mixer.flops``: forward costs 2 per weight and token. With full
    attention in all layers that is ``6·P·Σ n + 12·L·H·D · Σ n·(n + 1)/2``. Only a ``head_share`` fraction of tokens has
    logits. With an encoder, each document reads a source with its length in ``source_lengths``: source tokens go
    through ``source_parameters`` and the encoder's mixers, and cross attention costs ``4·L·H·D·n·s``. A head for
    documents costs 6 per weight and document; if it reads first tokens and is the only head, so does the last layer
    after attention. With stages (Swin), each stage has a quarter of the tokens before it, and its own weights; a
    merging multiplies the tokens after it. With adapters (LoRA) a frozen weight costs 4 per token instead of 6, and A
    and B cost 6.
    """
    if config.image.depths:
        return 3 * _stage_flops(config, lengths)
    linear = 2 * (matmul_parameters(config) * sum(lengths) + document_head_size(config) * len(lengths))
    mixing = sum(count * mixer.flops(config, lengths) for mixer, count in mixers_of(config).items())
    # Tokens without logits skip the head.
    without = round(2 * head_parameters(config) * sum(lengths) * (1 - head_share))
    without += 2 * unread_size(config) * (sum(lengths) - len(lengths))
    # Backward costs twice as much as forward, hence the factor 3.
    total = 3 * (linear - without + mixing + _source_flops(config, lengths, source_lengths))
    if config.adapter.is_used:
        # Frozen weights have no gradient.
        of_source = 2 * source_parameters(config) * sum(source_lengths)
        total += 6 * adapter_parameters(config) * sum(lengths) - (linear - without + of_source)
    return total


@cache
def adapter_parameters(config: ModelConfig) -> int:
    """Count the adapters' weights that multiply each token: of a layer's experts only the active ones."""
    # Imported late: only the decoder knows its projections, and most runs have no adapters.
    from longctx.conversion.tensor_layouts import parameter_shapes
    from longctx.model.experts.experts import is_expert_weight

    total = 0
    for name, shape in parameter_shapes(config).items():
        if is_adapter(name):
            size = math.prod(shape)
            if is_expert_weight(name):
                size = size // config.num_experts * config.experts_per_token
            total += size
    return total


def _stage_flops(config: ModelConfig, lengths: Sequence[int]) -> int:
    """Compute forward FLOPs for a model with stages, whose images have ``lengths`` patches each."""
    front = config.image.pixel_bytes * config.embedding_dim
    linear, mixing = front * sum(lengths) + document_head_size(config) * len(lengths), 0
    for number, stage in enumerate(stage_configs(config)):
        if number:
            lengths = [length // 4 for length in lengths]
            linear += merging_size(stage_configs(config)[number - 1]) * sum(lengths)
        counts = count_matrices(stage)
        linear += (counts["attention"] + counts["dense_ffn"]) * sum(lengths)
        mixing += sum(count * mixer.flops(stage, lengths) for mixer, count in mixers_of(stage).items())
    return 2 * linear + mixing


def _source_flops(config: ModelConfig, lengths: Sequence[int], source_lengths: Sequence[int]) -> int:
    """Compute forward FLOPs for the encoder and cross attention."""
    if not config.encoder_layers:
        return 0
    mixers = mixers_of(encoder_of(config)).items()
    encoder = sum(count * mixer.flops(config, source_lengths) for mixer, count in mixers)
    pairs = sum(n * s for n, s in zip(lengths, source_lengths, strict=True))
    cross = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    return 2 * source_parameters(config) * sum(source_lengths) + encoder + cross


def tokens_per_second(num_tokens: int, seconds: float) -> float:
    """Return ``num_tokens / seconds`` over all ranks; 0.0 if no time has passed."""
    if seconds <= 0:
        return 0.0
    return num_tokens / seconds


def model_tflops(flops: float, seconds: float, *, num_devices: int) -> float:
    """Return model TFLOP/s per device: ``flops / seconds / num_devices / 1e12``, with FLOPs summed over devices."""
    if seconds <= 0:
        return 0.0
    return flops / seconds / num_devices / 1e12


def mfu(flops: float, seconds: float, peak_flops: float | None) -> float | None:
    """Return model FLOPs utilization, 0 to 1: ``flops / (seconds · peak_flops)``.

    ``flops`` and ``peak_flops`` (FLOP/s) must both cover all devices, or both one device. Return None if the peak is
    unknown (a CPU) or no time has passed: an invented peak would make the metric meaningless.
    """
    if not peak_flops or seconds <= 0:
        return None
    return flops / (seconds * peak_flops)


def peak_device_flops(device_name: str, dtype: str) -> float | None:
    """Return a device's dense peak FLOP/s by its ``torch.cuda.get_device_name``; None if unknown.

    Covers bfloat16 only: float32 matmuls may or may not use TF32, which does not depend on the device.
    """
    if dtype != "bfloat16":
        return None
    # Longer names in a family come first: an H100 PCIe is slower than an H100.
    for name, tflops in _PEAK_TFLOPS_BFLOAT16:
        if name.lower() in device_name.lower():
            return tflops * 1e12
    return None

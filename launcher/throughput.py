"""How fast a run is: one function a quantity, each with its formula.

FLOPs here are *model* FLOPs: what the mathematics needs, two for each multiply-and-add. Work that an implementation
adds (recomputed activations, masked-out scores) is not counted, so a slower method never looks better.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

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
"""Dense bfloat16 tensor-core rates of the makers' data sheets; the first name found in the device's name counts."""


def matmul_parameters(config: ModelConfig) -> int:
    """Weights that one token is multiplied by: active experts only, no embedding look-up, norms or biases.

    Per layer: q and o ``2·M·H·D``, k and v ``2·M·K·D``, and either ``3·M·F`` (dense SwiGLU) or router ``M·E``, the
    chosen experts ``top_k·3·M·F_expert`` and the shared expert with its gate ``3·M·F_shared + M``. Once a model: the
    output head ``V·M``, tied or not.
    """
    width = config.hidden_size
    attention = 2 * width * config.head_dim * (config.num_heads + config.num_kv_heads)
    if config.num_experts:
        ffn = width * (config.num_experts + 3 * config.experts_per_token * config.expert_ffn_size)
        if config.shared_ffn_size:
            ffn += width * (3 * config.shared_ffn_size + 1)
    else:
        ffn = 3 * width * config.ffn_size
    return config.num_layers * (attention + ffn) + config.vocab_size * width


def document_lengths(cu_seqlens: Iterable[int]) -> list[int]:
    """Lengths of the segments between ascending boundaries: ``[0, 3, 8] -> [3, 5]``."""
    bounds = [int(bound) for bound in cu_seqlens]
    return [stop - start for start, stop in pairwise(bounds)]


def attended_pairs(lengths: Iterable[int]) -> int:
    """(query, key) pairs that a causal mask within each document leaves: ``Σ n·(n + 1) / 2``."""
    return sum(n * (n + 1) // 2 for n in lengths)


def mean_context(cu_seqlens: Iterable[int]) -> float:
    """Keys that a token sees on average, itself included: ``attended_pairs / tokens``; (n + 1) / 2 for one document."""
    lengths = document_lengths(cu_seqlens)
    num_tokens = sum(lengths)
    return attended_pairs(lengths) / num_tokens if num_tokens else 0.0


def training_flops(config: ModelConfig, lengths: Sequence[int]) -> int:
    """Model FLOPs of one forward and backward pass over documents of these lengths.

    ``6 · matmul_parameters · Σ n  +  12 · L · H · D · Σ n·(n + 1)/2``. Forward costs 2 a weight and token, and 4·D a
    head and (query, key) pair (scores, then values); backward costs twice as much again.
    """
    linear = 6 * matmul_parameters(config) * sum(lengths)
    attention = 12 * config.num_layers * config.num_heads * config.head_dim * attended_pairs(lengths)
    return linear + attention


def model_flops_per_token(config: ModelConfig, *, mean_context: float) -> float:
    """``training_flops`` of one token that sees ``mean_context`` keys: ``6·P + 12·L·H·D·mean_context``."""
    attention = 12 * config.num_layers * config.num_heads * config.head_dim * mean_context
    return 6 * matmul_parameters(config) + attention


def tokens_per_second(num_tokens: int, seconds: float) -> float:
    """``num_tokens / seconds`` of the whole world; 0.0 when no time has passed."""
    return num_tokens / seconds if seconds > 0 else 0.0


def model_tflops(flops: float, seconds: float, *, num_devices: int) -> float:
    """Model TFLOP/s of one device: ``flops / seconds / num_devices / 1e12``, with the FLOPs of the whole world."""
    return flops / seconds / num_devices / 1e12 if seconds > 0 else 0.0


def mfu(flops: float, seconds: float, peak_flops: float | None) -> float | None:
    """Model FLOPs utilisation, 0 to 1: ``flops / (seconds · peak_flops)``.

    ``flops`` and ``peak_flops`` (FLOP/s) are both of the whole world, or both of one device. None where the peak is
    not known (a CPU) or no time has passed: an invented peak would make the figure meaningless.
    """
    if not peak_flops or seconds <= 0:
        return None
    return flops / (seconds * peak_flops)


def peak_device_flops(device_name: str, dtype: str) -> float | None:
    """Dense peak FLOP/s of a device as ``torch.cuda.get_device_name`` calls it; None where we do not know it.

    Only bfloat16 is known: float32 matmuls may or may not use TF32, which is not the device's to say.
    """
    if dtype != "bfloat16":
        return None
    for name, tflops in _PEAK_TFLOPS_BFLOAT16:
        if name.lower() in device_name.lower():
            return tflops * 1e12
    return None

"""Measurement sizes: few enough to take a minute, far enough apart to interpolate between them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BenchmarkSizes:
    """Points for each table, ascending."""

    tokens: tuple[int, ...]
    """Tokens per matmul."""
    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    """Document lengths; several short documents are measured together, long ones singly."""
    squares: tuple[int, ...]
    """Queries, and as many keys; each query sees all keys."""
    windows: tuple[int, ...]
    head_dims: tuple[int, ...]
    num_heads: int
    tensor_bytes: tuple[int, ...]
    """Bytes per tensor that is copied, normalised, rotated …"""
    message_bytes: tuple[int, ...]
    state_widths: tuple[int, int]
    """Widths for two models, to measure gradient reduction and weight updates."""
    state_vocabularies: tuple[int, int]
    state_layers: tuple[int, int]
    """Layers for two versions of the smaller model; their time difference gives the time per layer."""
    state_steps: int
    logits: tuple[int, int]
    """Tokens and vocabulary."""
    file_bytes: int
    round_seconds: float
    """Repeat an action for this long in each of three rounds."""


ON_CPU = BenchmarkSizes(
    # Below about 500 tokens or width 200 a core multiplies more slowly; above, it gets no faster.
    tokens=(16, 128, 512, 2048),
    widths=(64, 192, 512, 1024),
    lengths=(128, 512, 2048, 4096),
    squares=(128, 512, 2048),
    windows=(128, 512, 2048),
    head_dims=(64, 128),
    num_heads=2,
    # L2 cache, L3 cache, beyond both, and above 32 MiB: from there on glibc maps new pages for each allocation.
    tensor_bytes=(1 << 16, 1 << 20, 1 << 23, 3 << 24),
    message_bytes=(1 << 12, 1 << 16, 1 << 20, 1 << 23),
    state_widths=(64, 384),
    state_vocabularies=(512, 8192),
    state_layers=(2, 6),
    state_steps=3,
    logits=(512, 8192),
    file_bytes=1 << 27,
    round_seconds=0.02,
)
ON_GPU = BenchmarkSizes(
    # Shapes from one billion parameters up: smaller matmuls are bound by their launch.
    tokens=(128, 1024, 8192, 32768),
    widths=(512, 2048, 4096, 8192),
    lengths=(512, 2048, 8192, 32768),
    squares=(512, 2048, 8192, 32768),
    windows=(512, 4096),
    head_dims=(64, 128),
    num_heads=16,
    tensor_bytes=(1 << 20, 1 << 24, 1 << 27, 1 << 29),
    message_bytes=(1 << 16, 1 << 20, 1 << 24, 1 << 28),
    state_widths=(256, 2048),
    state_vocabularies=(4096, 65536),
    state_layers=(2, 6),
    state_steps=5,
    logits=(4096, 65536),
    file_bytes=1 << 28,
    round_seconds=0.02,
)
TINY = BenchmarkSizes(
    tokens=(16, 64),
    widths=(32, 64),
    lengths=(64, 128),
    squares=(64,),
    windows=(32,),
    head_dims=(16,),
    num_heads=2,
    tensor_bytes=(1 << 12, 1 << 14),
    message_bytes=(1 << 10, 1 << 14),
    state_widths=(16, 32),
    state_vocabularies=(64, 512),
    state_layers=(1, 2),
    state_steps=1,
    logits=(16, 64),
    file_bytes=1 << 20,
    round_seconds=0.0,
)
"""For tests that ignore the measured values."""
BY_NAME = {"cpu": ON_CPU, "cuda": ON_GPU, "smallest": TINY}

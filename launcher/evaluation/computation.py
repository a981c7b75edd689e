"""Device, dtype and parallel degrees for inference from a checkpoint, shared by ``evaluate`` and ``generate``."""

from __future__ import annotations

from dataclasses import dataclass

from longctx.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Settings for ranks and device, equal on every rank."""

    chunk_tokens: int = 4096
    """Tokens per forward pass over a prompt, summed over ranks."""
    dtype: str = "float32"
    """Dtype for weights and computation."""
    device: str = "auto"
    context: int = 0
    """Ranks that share a prompt; 0 uses all."""
    expert: int = 1
    """Ranks that share the experts."""
    hostfile: str = "launcher"
    timeout_seconds: float = 1800.0
    """Maximum wait for another rank."""

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ConfigError(f"--chunk-tokens {self.chunk_tokens} must be at least 1. The default is 4096.")
        if self.timeout_seconds <= 0:
            raise ConfigError(f"--timeout-seconds {self.timeout_seconds} must be above 0. The default is 1800.")

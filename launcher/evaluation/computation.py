"""Device, dtype and division of a checkpoint's computation, shared by ``evaluate`` and ``generate``."""

from __future__ import annotations

from dataclasses import dataclass

from longctx.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Settings of ranks and device, equal on every rank."""

    chunk_tokens: int = 4096
    """Tokens that are read at a time, on however many ranks."""
    dtype: str = "float32"
    """Of the weights and of the computation."""
    device: str = "auto"
    context: int = 0
    """Ranks that share a prompt; 0 for all."""
    expert: int = 1
    """Ranks that share the experts."""
    hostfile: str = "launcher"
    timeout_seconds: float = 1800.0
    """How long a rank waits for another."""

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ConfigError(f"--chunk-tokens {self.chunk_tokens} must be at least 1. The default is 4096.")
        if self.timeout_seconds <= 0:
            raise ConfigError(f"--timeout-seconds {self.timeout_seconds} must be above 0. The default is 1800.")

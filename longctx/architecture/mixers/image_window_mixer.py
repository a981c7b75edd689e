"""Softmax attention within square windows of an image's patches (Swin, arXiv 2103.14030).

Axes: M model width, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from longctx.architecture.fields import ModelFields
from longctx.architecture.mixers.mixer import CacheShape, Mixer
from longctx.architecture.mixers.softmax_mixer import output_bias
from longctx.errors import ConfigError


@dataclass(frozen=True)
class ImageWindowMixer(Mixer):
    """Attention in windows of ``side`` × ``side`` patches, with a learned bias per head and relative position.

    With a ``shift`` the grid of windows starts that many patches further down and to the right. Windows that reach over
    the image's edge continue on its other side, but patches from different sides do not see each other.
    """

    rows: int = 0
    """Patch rows in an image."""
    columns: int = 0
    side: int = 0
    shift: int = 0

    name: ClassVar[str] = "image_window"
    core: ClassVar[str] = "image_windows"
    has_scores: ClassVar[bool] = False

    @property
    def lookback_tokens(self) -> int | None:
        return None

    @property
    def num_biases(self) -> int:
        """Relative positions of two patches in a window."""
        return (2 * self.side - 1) ** 2

    def check(self, config: ModelFields) -> None:
        wanted = {"causal": False, "position": "none", "num_kv_heads": config.num_heads, "qk_norm": "none"}
        for name, value in wanted.items():
            if getattr(config, name) != value:
                raise ConfigError(
                    f"model.{name}={getattr(config, name)!r} does not work with image_window layers. Try model.{name}="
                    f"{value!r}."
                )
        if not config.image.window:
            raise ConfigError("model.layers lists image windows, but model.image.window=0. Try model.image.window=7.")

    def matrices(self, config: ModelFields) -> int:
        return 4 * config.num_heads * config.head_dim * config.hidden_size

    def vectors(self, config: ModelFields) -> int:
        of_qkv = 3 * config.num_heads * config.head_dim if config.qkv_bias else 0
        return of_qkv + output_bias(config) + self.num_biases * config.num_heads

    def flops(self, config: ModelFields, lengths: Sequence[int]) -> int:
        """Return forward FLOPs: ``4·H·D`` per (query, key) pair in a window."""
        return 4 * config.num_heads * config.head_dim * self.side**2 * sum(lengths)

    def cached(self, config: ModelFields, num_tokens: int, chunk_tokens: int) -> CacheShape:
        raise ConfigError("image_window layers see windows on both sides of a token, so none can be added to a cache.")

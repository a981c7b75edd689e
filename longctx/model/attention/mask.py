"""AttentionMask: the keys that a query sees, as a plain value.

``local.py`` turns it into slices on one device, ``parallel/schedule/bands.py`` across ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from longctx.architecture.mixers.image_window_mixer import ImageWindowMixer
from longctx.batch import PackedDocuments
from longctx.errors import ConfigError


@dataclass(frozen=True)
class AttentionMask:
    """Keys that a query may see: in its own document, earlier ones only if ``causal``, near ones if windowed.

    ``documents`` always describes the full sequence, even if this process holds part of it.
    """

    documents: PackedDocuments
    """Document boundaries; a list or tensor (``cu_seqlens``) is converted."""
    causal: bool = True
    window: int | None = None
    """Tokens that a query sees, including itself: keys with 0 ≤ i − j < window (|i − j| < window if not causal)."""
    sink_tokens: int = 0
    """First tokens of each document, which its queries also see beyond the window (arXiv 2309.17453)."""
    stride: int = 0
    """Spacing of tokens that a query sees beyond the window: multiples of this before it (arXiv 1904.10509), and after
    it if not causal; 0 disables them."""
    image_windows: ImageWindowMixer | None = None
    """Windows within images, which alone decide what a query sees; None for documents as sequences."""
    key_documents: PackedDocuments | None = None
    """Documents in the key sequence, in cross attention: a query sees the entire document with its own's number. None
    for self attention."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "documents", PackedDocuments.of(self.documents))
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window={self.window} must be at least 1: a query sees itself. Use None for no window.")
        if self.sink_tokens < 0:
            raise ConfigError(f"sink_tokens={self.sink_tokens} must be at least 0; 0 disables sink tokens.")
        self._check_stride()
        self._check_cross()

    def _check_stride(self) -> None:
        if self.stride < 0:
            raise ConfigError(f"stride={self.stride} must be at least 0; 0 disables it.")
        # Sink tokens also belong to a class of the stride: their keys would count twice.
        if self.stride and (self.window is None or self.sink_tokens):
            raise ConfigError(
                f"stride={self.stride} needs a window and no sink tokens; got window={self.window}, "
                f"sink_tokens={self.sink_tokens}."
            )

    def _check_cross(self) -> None:
        if self.key_documents is None:
            return
        if self.causal or self.window is not None or self.sink_tokens or self.stride:
            raise ConfigError(
                "cross attention sees complete source documents: it has no causal mask, window, sink tokens or stride."
            )
        count, own = self.key_documents.num_documents, self.documents.num_documents
        if count != own:
            raise ConfigError(
                f"got {own} query documents and {count} key documents: query document i sees key document i."
            )

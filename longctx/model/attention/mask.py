"""AttentionMask: the keys that a query sees, as a plain value.

Slices of work are made from it in ``local.py`` on one device, and in ``parallel/schedule/bands.py`` across ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from longctx.batch import PackedDocuments
from longctx.errors import ConfigError


@dataclass(frozen=True)
class AttentionMask:
    """Keys that a query may see: those of its own document, only earlier ones if ``causal``, near ones if windowed.

    ``documents`` are those of the full sequence, also when this process holds only a part of it.
    """

    documents: PackedDocuments
    """A list or a tensor of boundaries (``cu_seqlens``) becomes one."""
    causal: bool = True
    window: int | None = None
    """Tokens a query sees, itself included: keys with 0 ≤ i − j < window (|i − j| < window when not causal)."""
    sink_tokens: int = 0
    """First tokens of a document that its queries see from beyond the window too (arXiv 2309.17453)."""
    stride: int = 0
    """Beyond the window, queries see tokens a multiple of this before them (arXiv 1904.10509), and behind them if not
    causal; 0 for none."""
    key_documents: PackedDocuments | None = None
    """The documents of the sequence that keys are of, in cross attention: a query sees all of the one with its own's
    number. None if they are the queries' own."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "documents", PackedDocuments.of(self.documents))
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window={self.window} must be at least 1: a query sees itself. None lifts the window.")
        if self.sink_tokens < 0:
            raise ConfigError(f"sink_tokens={self.sink_tokens} must not be negative; 0 has none.")
        self._check_stride()
        self._check_cross()

    def _check_stride(self) -> None:
        if self.stride < 0:
            raise ConfigError(f"stride={self.stride} must not be negative; 0 has none.")
        # Sink tokens are in a class of the stride too: their keys would be met twice.
        if self.stride and (self.window is None or self.sink_tokens):
            raise ConfigError(
                f"stride={self.stride} needs a window, and goes with no sink tokens; got window={self.window}, "
                f"sink_tokens={self.sink_tokens}."
            )

    def _check_cross(self) -> None:
        if self.key_documents is None:
            return
        if self.causal or self.window is not None or self.sink_tokens or self.stride:
            raise ConfigError("cross attention sees all of a document: it has no side, window, sink tokens or stride.")
        count, own = self.key_documents.num_documents, self.documents.num_documents
        if count != own:
            raise ConfigError(f"{own} documents of queries and {count} of keys: each sees the one of its number.")

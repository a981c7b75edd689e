"""``ExampleRule``: properties of examples that packing and reading need to know."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class ExampleRule(Protocol):
    """Lengths of examples made from document pieces (``rows.examples``)."""

    @property
    def has_segments(self) -> bool:
        """True if an example has two segments."""
        ...

    @property
    def has_labels(self) -> bool:
        """True if an example may have a label."""
        ...

    @property
    def pixel_bytes(self) -> int:
        """Pixel bytes per token; 0 if examples consist of token ids alone."""
        ...

    @property
    def least_tokens(self) -> int:
        """Length of the shortest piece that makes an example; shorter pieces are dropped."""
        ...

    def most_tokens(self, seq_len: int, source_seq_len: int) -> int:
        """Return the longest piece length with an example that fits into a row."""
        ...

    def lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Return the example lengths for pieces of these lengths."""
        ...

    def source_lengths(self, lengths: np.ndarray) -> np.ndarray | None:
        """Return each example's encoder input length, if examples have encoder input."""
        ...

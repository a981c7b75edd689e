"""``ExampleRule``: the properties of examples made from texts that packing needs."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class ExampleRule(Protocol):
    """Lengths of the examples made from pieces of texts (``rows.examples``)."""

    @property
    def has_segments(self) -> bool:
        """True if an example has two segments."""
        ...

    @property
    def least_tokens(self) -> int:
        """Tokens of the shortest piece that makes an example; shorter ones are left out."""
        ...

    def most_tokens(self, seq_len: int, source_seq_len: int) -> int:
        """Return the tokens of the longest piece whose example fits into a row."""
        ...

    def lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Return the tokens of the examples of pieces of these lengths."""
        ...

    def source_lengths(self, lengths: np.ndarray) -> np.ndarray | None:
        """Return the tokens of each example's encoder input; None if there is none."""
        ...

"""``ExampleRule``: what packing has to know of examples that are made of texts."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class ExampleRule(Protocol):
    """How long pieces of texts are once examples are made of them (``rows.examples``)."""

    @property
    def has_segments(self) -> bool:
        """Whether an example has two segments."""
        ...

    @property
    def least_tokens(self) -> int:
        """Tokens of the shortest piece that makes an example; shorter ones are left out."""
        ...

    def most_tokens(self, seq_len: int, source_seq_len: int) -> int:
        """Tokens of the longest piece whose example fits a row."""
        ...

    def lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens of the examples of pieces of these lengths."""
        ...

    def source_lengths(self, lengths: np.ndarray) -> np.ndarray | None:
        """Tokens of what an encoder reads beside each; None if it reads nothing."""
        ...

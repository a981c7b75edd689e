"""AttentionMask: which keys a query sees. A value, nothing computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from torch import Tensor

from longctx.errors import ConfigError
from longctx.model.attention.strided import Strided, whole_documents


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query may see: those of its own document, earlier ones alone if ``causal``, near ones if windowed.

    ``cu_seqlens`` are the global boundaries of the (flattened) sequence, also when this process holds only a part.
    """

    cu_seqlens: tuple[int, ...]
    causal: bool = True
    window: int | None = None
    """Tokens a query sees, itself included: keys with 0 ≤ i − j < window (|i − j| < window when not causal)."""
    sink_tokens: int = 0
    """First tokens of a document that its queries see from beyond the window too (arXiv 2309.17453)."""
    stride: int = 0
    """Beyond the window, queries see tokens a multiple of this before them (arXiv 1904.10509); 0 for none."""
    num_tokens: int = field(init=False, compare=False, repr=False)
    """Length of the whole sequence."""
    num_documents: int = field(init=False, compare=False, repr=False)
    """Documents of the sequence, empty ones too."""
    longest: int = field(init=False, compare=False, repr=False)
    """Tokens of the longest document."""
    slice_table: Tensor = field(init=False, compare=False, repr=False)
    """The work of a process that holds the whole sequence: the table of ``document_slices``.

    Formed here, once, as the counts are, for a compiled layer: numbers it reads in ``cu_seqlens`` are compiled in.
    """

    def __post_init__(self) -> None:
        if self.cu_seqlens[:1] != (0,) or any(b < a for a, b in pairwise(self.cu_seqlens)):
            raise ConfigError(f"cu_seqlens {_shown(self.cu_seqlens)} must start at 0 and never descend.")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window={self.window} must be at least 1: a query sees itself. None lifts the window.")
        if self.sink_tokens < 0:
            raise ConfigError(f"sink_tokens={self.sink_tokens} must not be negative; 0 has none.")
        self._check_stride()
        from longctx.kernels.attention.slices import slice_table
        from longctx.model.attention.local import document_slices

        object.__setattr__(self, "num_tokens", self.cu_seqlens[-1])
        object.__setattr__(self, "num_documents", len(self.cu_seqlens) - 1)
        object.__setattr__(self, "longest", max((b - a for a, b in pairwise(self.cu_seqlens)), default=0))
        object.__setattr__(self, "slice_table", slice_table(document_slices(self)))

    @cached_property
    def strided(self) -> Strided | None:
        """The rest of that work: what the stride lets queries see before their windows.

        Formed when it is first asked for, which should not be in a compiled layer; ranks that hold a part of the
        sequence have no use for it.
        """
        from longctx.model.attention.local import strided_beyond

        return strided_beyond(self, whole_documents(self.cu_seqlens))

    def _check_stride(self) -> None:
        if self.stride < 0:
            raise ConfigError(f"stride={self.stride} must not be negative; 0 has none.")
        if self.stride and (self.window is None or self.sink_tokens or not self.causal):
            raise ConfigError(
                f"stride={self.stride} needs a window and goes with neither sink tokens nor bidirectional attention; "
                f"got window={self.window}, sink_tokens={self.sink_tokens}, causal={self.causal}."
            )


def _shown(cu_seqlens: tuple[int, ...]) -> str:
    """The boundaries around the first that is out of order."""
    wrong = next((i for i, (a, b) in enumerate(pairwise(cu_seqlens)) if b < a), 0)
    return f"[… {', '.join(map(str, cu_seqlens[wrong : wrong + 2]))} …]"

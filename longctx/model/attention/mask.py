"""AttentionMask: which keys a query sees. A value, nothing computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from longctx.documents import PackedDocuments
from longctx.errors import ConfigError
from longctx.model.attention.strided import whole_documents
from longctx.model.attention.work import Work


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query may see: those of its own document, earlier ones alone if ``causal``, near ones if windowed.

    ``documents`` are those of the whole sequence, also when this process holds only a part of it.
    """

    documents: PackedDocuments
    """A list or a tensor of boundaries (``cu_seqlens``) becomes one."""
    causal: bool = True
    window: int | None = None
    """Tokens a query sees, itself included: keys with 0 ≤ i − j < window (|i − j| < window when not causal)."""
    sink_tokens: int = 0
    """First tokens of a document that its queries see from beyond the window too (arXiv 2309.17453)."""
    stride: int = 0
    """Beyond the window, queries see tokens a multiple of this before them (arXiv 1904.10509); 0 for none."""
    slice_table: Tensor = field(init=False, compare=False, repr=False)
    """The work of a process that holds the whole sequence: the table of ``document_slices``.

    Formed here, once, for a compiled layer: numbers it reads in the boundaries are compiled in.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "documents", PackedDocuments.of(self.documents))
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window={self.window} must be at least 1: a query sees itself. None lifts the window.")
        if self.sink_tokens < 0:
            raise ConfigError(f"sink_tokens={self.sink_tokens} must not be negative; 0 has none.")
        self._check_stride()
        from longctx.kernels.attention.slices import slice_table
        from longctx.model.attention.local import document_slices

        object.__setattr__(self, "slice_table", slice_table(document_slices(self)))

    @cached_property
    def strided(self) -> Work | None:
        """The rest of that work: what the stride lets queries see before their windows.

        Formed when it is first asked for, which should not be in a compiled layer; ranks that hold a part of the
        sequence have no use for it.
        """
        from longctx.model.attention.local import strided_beyond

        return strided_beyond(self, whole_documents(self.documents.bounds))

    def _check_stride(self) -> None:
        if self.stride < 0:
            raise ConfigError(f"stride={self.stride} must not be negative; 0 has none.")
        if self.stride and (self.window is None or self.sink_tokens or not self.causal):
            raise ConfigError(
                f"stride={self.stride} needs a window and goes with neither sink tokens nor bidirectional attention; "
                f"got window={self.window}, sink_tokens={self.sink_tokens}, causal={self.causal}."
            )

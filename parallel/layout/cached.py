"""One layout a batch, shared by split and schedules."""

from __future__ import annotations

from functools import lru_cache

from longctx.documents import PackedDocuments
from parallel.layout.sequence import SequenceLayout


@lru_cache(maxsize=64)  # of a step's micro-batches, whose tokens are split before the first is computed
def cached_layout(kind: str, degree: int, ulysses: int, documents: PackedDocuments) -> SequenceLayout:
    """The layout of a batch, built once for all that ask: the split of its tokens and the schedules of its masks."""
    return SequenceLayout.build(kind, documents.num_tokens, degree, documents, ulysses)
